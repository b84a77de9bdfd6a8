"""Scheduler state of all blocks: free ids, state, and the number of requests and windows over each."""

from __future__ import annotations

from collections import deque

import numpy as np

from kvc_kernels.store import SCRATCH_BLOCK

from .sequence_table import SequenceTable

NO_BLOCKS = np.empty(0, dtype=np.int64)


class State:
    """State of a block: FREE -> OPEN (bf16, being filled or inside a window) -> PACKED at format id 1, 2, ... -> FREE.

    It is the state after all queued operations have run; the CPU knows no other. The states are plain ints, because
    numpy compares arrays with members of an `IntEnum` several times more slowly.
    """

    FREE = 0
    OPEN = 1
    PACKED = 2


class Blocks:
    """One record per block id, in numpy arrays `[num_blocks]`. Ids are plain ints; SGLang's slot is id * P + offset.

    * `ref_count[b]`: running requests whose sequence contains block b.
    * `window_count[b]`: running requests whose recent window (or unfinished part) contains block b. A block is
      compacted only at 0, so of several sharers the one with the latest window decides.
    * `generation[b]`: rises at every free, so that a late page count is not taken for one of the block's next owner.
    * `start[b]`: position in the sequence of the block's first token.
    * `prompt[b]`: tokens of the whole prompt of the request that wrote the block, if its prefill did and attention
      scores are collected, else 0. It says which queries of the block count.
    * `unread[b]`: no query that counts for the policy's attention scores has read block b, including those of the
      forward allocated last. Such a block is not planned.
    * `num_tokens[b]`: tokens written or about to be. The tokens of a one-shot prompt are divided among its remaining
      blocks.

    `sequences` holds records of the running sequences.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.state = np.zeros(num_blocks, dtype=np.int8)
        self.format_id = np.zeros(num_blocks, dtype=np.int8)
        self.ref_count = np.zeros(num_blocks, dtype=np.int32)
        self.window_count = np.zeros(num_blocks, dtype=np.int32)
        self.generation = np.zeros(num_blocks, dtype=np.int32)
        self.start = np.zeros(num_blocks, dtype=np.int64)
        self.prompt = np.zeros(num_blocks, dtype=np.int64)
        self.num_tokens = np.zeros(num_blocks, dtype=np.int32)
        self.unread = np.zeros(num_blocks, dtype=bool)
        self.sequences = SequenceTable()
        self.reset()

    def reset(self) -> None:
        self.generation += 1
        for record in (
            self.state, self.format_id, self.ref_count, self.window_count, self.start, self.prompt, self.num_tokens,
            self.unread,
        ):  # fmt: skip
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

    def open_indices(self, ids: list[int]) -> list[int]:
        """Indices into `ids` of the uncompressed blocks."""
        return np.flatnonzero(self.state[ids] == State.OPEN).tolist() if ids else []

    def take(self, n: int, starts: list[int]) -> list[int]:
        """Take `n` ids, oldest freed first, and make them OPEN. `starts`: positions of their first tokens."""
        ids = [self._free.popleft() for _ in range(n)]
        blocks = np.array(ids, dtype=np.int64)
        self.state[blocks] = State.OPEN
        self.format_id[blocks] = 0
        self.unread[blocks] = False
        self.start[blocks] = starts
        self.prompt[blocks] = 0
        return ids

    def give_back(self, ids: np.ndarray) -> None:
        """Free `ids` (distinct; none is free)."""
        if (self.state[ids] == State.FREE).any():
            raise AssertionError(f"blocks freed twice: {ids[self.state[ids] == State.FREE].tolist()}")
        self.state[ids] = State.FREE
        self.ref_count[ids] = 0
        self.window_count[ids] = 0
        self.generation[ids] += 1
        self._free.extend(ids.tolist())
