"""Append: new rows into the open bf16 blocks."""
