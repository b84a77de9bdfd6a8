"""Statistics: their records and collection, the head map, and `sglang-kvc inspect`."""
