"""SGLang's token-to-KV allocator over blocks: slots are only names, handed out from CPU records without a sync."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import torch
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator

from ..cache.runtime import Runtime
from ..cache.sequence import Sequence
from .pool import KvcPool


class KvcAllocator(BaseTokenToKVPoolAllocator):
    """Slot = block id * P + offset. Ownership follows `req.kvc` (a `Sequence`) and the tree's nodes, never tensors.

    `available_size` is physical and conservative: what an allocation gets now, in whole uncompressed blocks.
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
        self._reqs = None
        self._full_at = 0

    def available_size(self) -> int:
        return self.runtime.available_tokens()

    def used_slots(self) -> int:
        """Virtual view, exact: slots of all blocks that have an owner. Only the leak check reads it."""
        return self.runtime.blocks.used_count * self.page_size

    def remember_full(self) -> None:
        """A request was just refused for want of memory."""
        self._full_at = self.runtime.reachable_tokens()

    def has_room_again(self) -> bool:
        """Whether at least a block has come free since then. Each refusal raises what the next look waits for, so
        that a queue is not gone through in every step."""
        return self.runtime.reachable_tokens() >= self._full_at + self.page_size

    @contextmanager
    def for_requests(self, reqs, need: int):
        """Bind the requests of the coming `alloc_*` call, which SGLang does not pass, and its exact need in tokens."""
        self._reqs = reqs
        try:
            with self.runtime.exact_need(need):
                yield
        finally:
            self._reqs = None

    def blocks_missing(self, reqs, lengths: list[int]) -> int:
        return sum(len(r.kvc.new_block_starts(n)) for r, n in zip(reqs, lengths))

    def alloc_extend(
        self, prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens, num_new_pages=None
    ) -> torch.Tensor | None:
        """Slots int64 `[extend_num_tokens]` of the new tokens, None if they do not fit."""
        lengths = seq_lens_cpu.tolist()
        if not self._grow(lengths):
            return None
        slots = [
            self._slots(r.kvc, first, last)
            for r, first, last in zip(self._reqs, prefix_lens_cpu.tolist(), lengths)
        ]
        return self._to_device(np.concatenate(slots))

    def alloc_decode(self, seq_lens, seq_lens_cpu, last_loc) -> torch.Tensor | None:
        """Slots int64 `[bs]` of one new token per request, None if they do not fit."""
        lengths = seq_lens_cpu.tolist()
        if not self._grow(lengths):
            return None
        p = self.page_size
        slots = [r.kvc.blocks[(n - 1) // p] * p + (n - 1) % p for r, n in zip(self._reqs, lengths)]
        return self._to_device(np.asarray(slots, dtype=np.int64))

    def _grow(self, lengths: list[int]) -> bool:
        """Take the blocks that the bound requests need for `lengths`, all or none."""
        missing = [r.kvc.new_block_starts(n) for r, n in zip(self._reqs, lengths)]
        ids = self.runtime.take([start for starts in missing for start in starts])
        if ids is None:
            return False
        at = 0
        for r, starts, n in zip(self._reqs, missing, lengths):
            if starts:
                r.kvc.extend(ids[at : at + len(starts)])
                at += len(starts)
            r.kvc.fill(n)
        return True

    def _slots(self, seq: Sequence, first: int, last: int) -> np.ndarray:
        pos = np.arange(first, last, dtype=np.int64)
        return np.asarray(seq.blocks, dtype=np.int64)[pos // self.page_size] * self.page_size + pos % self.page_size

    def _to_device(self, slots: np.ndarray) -> torch.Tensor:
        host = torch.from_numpy(slots)
        return host if self.device == "cpu" else host.pin_memory().to(self.device, non_blocking=True)

    def clear(self) -> None:
        """flush_cache: with the tree's `reset` the only way to forget everything; either may come first."""
        self.runtime.reset()

    def alloc(self, need_size: int):
        raise RuntimeError("--kv-backend kvc allocates whole blocks per request; alloc(n) has no owner to give them to")

    def free(self, free_index: torch.Tensor) -> None:
        """SGLang frees rows that the tree has not taken; here blocks are freed by the tree, from CPU records."""
        if free_index.numel():
            raise RuntimeError("--kv-backend kvc frees blocks by id, through the radix cache, not by slots")
