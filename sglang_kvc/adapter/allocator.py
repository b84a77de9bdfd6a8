"""Token-to-KV allocator over blocks: slots are computed from the scheduler state, without a sync."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator

from ..cache.runtime import Runtime
from ..cache.sequence import Sequence
from .pool import KvcPool


class KvcAllocator(BaseTokenToKVPoolAllocator):
    """Slot = block id * P + offset. Ownership follows `req.kvc` (a `Sequence`) and the tree's nodes, never tensors.

    `available_size` is physical and conservative: tokens of the uncompressed blocks that can be taken now.
    """

    def __init__(self, runtime: Runtime, pool: KvcPool, device: str):
        super().__init__(
            size=runtime.sizing.capacity_tokens,
            page_size=runtime.layout.block_tokens,
            dtype=torch.uint8,
            device=device,
            kvcache=pool,
            need_sort=False,
        )
        self.runtime = runtime
        self.capacity = runtime.capacity
        # Set within `for_sequences`:
        self._seqs: list[Sequence] | None = None
        self._lengths: Any = None  # list[int], or int64 `[n]` for a decode step

    def available_size(self) -> int:
        return self.capacity.available_tokens()

    def max_new_tokens_for_memory(self, input_tokens: int, max_new_tokens: int, **kwargs) -> int:
        """Return `max_new_tokens` unchanged: a request's quality decides what fits, and SGLang does not pass it
        here."""
        return max_new_tokens

    def used_slots(self) -> int:
        """Number of slots of all owned blocks and of all places in the gaps of running sequences. Only the leak check
        reads this exact, virtual count."""
        return (self.runtime.blocks.used_count + self.runtime.gap_blocks) * self.page_size

    @contextmanager
    def for_sequences(self, seqs: list[Sequence], lengths: list[int] | np.ndarray):
        """Context in which `alloc` and `alloc_extend` let `seqs`, which SGLang does not pass, grow to `lengths`
        tokens."""
        self._seqs, self._lengths = seqs, lengths
        try:
            yield
        finally:
            self._seqs = self._lengths = None

    def evict_to_free_tokens(self, tree_cache, num_tokens: int) -> bool | None:
        """Make room. Inside `for_sequences`, the room is that of the blocks that the sequences need, without SGLang's
        slack."""
        if self._seqs is None:
            return super().evict_to_free_tokens(tree_cache, num_tokens)
        if num_tokens * self.page_size <= self.available_size():
            return None  # enough for one block per new token
        return super().evict_to_free_tokens(tree_cache, self.capacity.new_block_tokens(self._seqs, self._lengths))

    def alloc_extend(
        self, prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens, num_new_pages=None
    ) -> torch.Tensor | None:
        """Slots int64 `[extend_num_tokens]` of the new tokens, None if they do not fit."""
        if not self.runtime.grow(self._seqs, self._lengths):
            return None
        ranges = zip(self._seqs, prefix_lens_cpu.tolist(), self._lengths)
        slots = [self._slots(seq, first, last) for seq, first, last in ranges]
        return self.runtime.store.upload(np.concatenate(slots))

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Slots int64 `[need_size]` of one new token per sequence, None if they do not fit."""
        if self._seqs is None:
            raise RuntimeError(
                "--kv-backend kvc allocates blocks for requests, but alloc(n) names none; call it in `for_sequences`"
            )
        slots = self.runtime.grow_by_one(self._seqs, self._lengths)
        return None if slots is None else self.runtime.store.upload(slots)

    def _slots(self, seq: Sequence, first: int, last: int) -> np.ndarray:
        pos = np.arange(first, last, dtype=np.int64)
        return np.asarray(seq.blocks, dtype=np.int64)[pos // self.page_size] * self.page_size + pos % self.page_size

    def clear(self) -> None:
        """Forget everything (flush_cache, which also calls the tree's `reset`, in either order)."""
        self.runtime.reset()

    def free(self, free_index: torch.Tensor) -> None:
        """Refuse slots: the radix cache frees all blocks by id."""
        if free_index.numel():
            raise RuntimeError("--kv-backend kvc frees blocks by id, through the radix cache, not by slots")
