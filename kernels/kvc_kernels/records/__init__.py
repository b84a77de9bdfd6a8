"""Blocks as records: bytes that name no page, to be kept outside the pool and brought back."""
