"""sglang_kvc."""
