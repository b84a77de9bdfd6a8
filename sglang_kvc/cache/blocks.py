"""CPU records of all blocks: free ids, life cycle, and who still needs a block uncompressed."""

from __future__ import annotations

from collections import deque
from enum import IntEnum

import numpy as np

from kvc_kernels.store import SCRATCH_BLOCK


class State(IntEnum):
    """A block's life: FREE -> OPEN (bf16, being filled or inside a window) -> PACKED at rung 1, 2, ... -> FREE.

    It is the state after all queued operations have run, which is the only one that the CPU reasons about.
    """

    FREE = 0
    OPEN = 1
    PACKED = 2


class Blocks:
    """One record per block id, in numpy arrays; ids are plain ints that SGLang multiplies by P to name slots.

    * `pins[b]`: running requests in whose window (or unfinished part) block b lies. A block is compacted only at 0
      pins: of several sharers the one with the latest window decides.
    * `users[b]`: running requests whose sequence contains block b.
    * `generation[b]`: rises at every free, so that a count that comes back late can be told from its successor's.
    * `start[b]`: position in the sequence of the block's first token.
    * `filled[b]`: tokens written or about to be.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.state = np.zeros(num_blocks, dtype=np.int8)
        self.rung = np.zeros(num_blocks, dtype=np.int8)
        self.pins = np.zeros(num_blocks, dtype=np.int32)
        self.users = np.zeros(num_blocks, dtype=np.int32)
        self.generation = np.zeros(num_blocks, dtype=np.int32)
        self.start = np.zeros(num_blocks, dtype=np.int64)
        self.filled = np.zeros(num_blocks, dtype=np.int32)
        self.reset()

    def reset(self) -> None:
        self.generation += 1
        for record in (self.state, self.rung, self.pins, self.users, self.start, self.filled):
            record[:] = 0
        self._free = deque(b for b in range(self.num_blocks) if b != SCRATCH_BLOCK)

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def used_count(self) -> int:
        return self.num_blocks - 1 - len(self._free)

    def count_packed(self, ids: list[int]) -> int:
        return int(np.count_nonzero(self.state[ids] == State.PACKED)) if ids else 0

    def take(self, n: int, starts: list[int]) -> list[int]:
        """n free ids, oldest freed first, now OPEN; `starts` are the positions of their first tokens."""
        ids = [self._free.popleft() for _ in range(n)]
        self.state[ids] = State.OPEN
        self.rung[ids] = 0
        self.start[ids] = starts
        return ids

    def give_back(self, ids: np.ndarray) -> None:
        """Free `ids` (distinct, none of them free)."""
        if (self.state[ids] == State.FREE).any():
            raise AssertionError(f"blocks freed twice: {ids[self.state[ids] == State.FREE].tolist()}")
        self.state[ids] = State.FREE
        self.pins[ids] = 0
        self.users[ids] = 0
        self.generation[ids] += 1
        self._free.extend(ids.tolist())
