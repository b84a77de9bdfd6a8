"""Subclasses of SGLang's KV pool, allocator, radix cache and attention backend, which SGLang calls, and the
functions that hooks ask."""
