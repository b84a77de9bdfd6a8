"""Keys of the radix tree."""

from __future__ import annotations

from collections.abc import Iterator

from sglang.srt.mem_cache.radix_cache import RadixKey


class BlockKey(RadixKey):
    """SGLang's key with bytes instead of a tuple of Python ints as child key, which takes a fifth of the memory at 128
    tokens per block."""

    __slots__ = ()

    @classmethod
    def of(cls, key: RadixKey) -> BlockKey:
        return cls(key.token_ids, key.extra_key, limit=key.limit, cache_salt=key.cache_salt)

    def __getitem__(self, idx) -> BlockKey:
        return BlockKey.of(super().__getitem__(idx))

    def match_at(self, other: RadixKey, offset: int, page_size: int = 1) -> int:
        """SGLang's result, with one comparison for a key that matches whole, as most nodes of a path do."""
        n, mine, theirs = self._raw_len(), self.token_ids, other.token_ids
        if self.is_bigram or other.is_bigram or not 0 <= offset <= other._raw_len() - n:
            return super().match_at(other, offset, page_size)
        self._check_compatible(other)
        if mine[:n] != theirs[offset : offset + n]:
            return super().match_at(other, offset, page_size)
        return n // page_size * page_size

    def child_key_at(self, offset: int, page_size: int = 1):
        plain = self.token_ids[offset : offset + page_size].tobytes()
        if self.cache_salt is not None:
            return (self.extra_key, self.cache_salt), plain
        return plain if self.extra_key is None else (self.extra_key, plain)


def block_hashes(key: BlockKey, begin: int, page_size: int, prefix: int) -> Iterator[int]:
    """Hashes of the full blocks from token `begin` on. Each covers all tokens up to the end of its block, of which
    `prefix` is the hash up to `begin`. Processes have different hashes."""
    for at in range(begin, len(key) // page_size * page_size, page_size):
        prefix = hash((prefix, key.child_key_at(at, page_size)))
        yield prefix
