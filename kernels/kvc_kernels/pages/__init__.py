"""Pages: their allocation and release, and dense rows and tiers read back from them."""
