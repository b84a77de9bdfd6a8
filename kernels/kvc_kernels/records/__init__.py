"""Blocks as records: bytes without page ids, which can be stored outside the pool and brought back."""
