"""CPU records of the compressed cache: blocks, sequences, queued operations, memory sizes and the runtime."""
