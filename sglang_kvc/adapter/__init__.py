"""Classes that SGLang calls: KV pool, allocator, radix cache with its eviction queue, attention backend."""
