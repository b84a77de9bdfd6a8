"""Statistics: `records.py`, their collection from a runtime, the head map, and `sglang-kvc inspect`."""
