"""Arrays over the running sequences, so that a decode step reads and updates all of them in a few operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .sequence import Sequence

ROWS = 256  # rows added at a time


class SequenceTable:
    """One row per running sequence, in numpy arrays int64 `[rows]`. A sequence has its row from admission to release,
    and writes its changes there.

    * `length[r]`: tokens written or about to be.
    * `room[r]`: tokens that its blocks hold.
    * `last_block[r]`: id of its last block.
    * `due[r]`: written tokens at which the next block leaves its window.
    """

    def __init__(self) -> None:
        self._table = np.zeros((4, 0), dtype=np.int64)
        self._free: list[int] = []
        self._last_seqs: list[Sequence] = []
        self._rows = np.empty(0, dtype=np.int64)
        self._reqs: list = []
        self._seqs: list[Sequence] = []

    def take(self) -> int:
        """A row that no sequence has."""
        if not self._free:
            first = self._table.shape[1]
            self._table = np.pad(self._table, ((0, 0), (0, ROWS)))
            self.length, self.room, self.last_block, self.due = self._table
            self._free = list(range(first, first + ROWS))
        self._reqs = []
        return self._free.pop()

    def give_back(self, row: int) -> None:
        self._free.append(row)
        self._reqs = []

    def of(self, reqs: list) -> list[Sequence]:
        """The sequences `req.kvc` of running requests; the caller must not change the list. Most steps have the
        requests of the step before. Their sequences are then the same, too, unless one was admitted or released in
        between."""
        if reqs != self._reqs:
            self._reqs, self._seqs = list(reqs), [req.kvc for req in reqs]
        return self._seqs

    def rows_of(self, seqs: list[Sequence]) -> np.ndarray:
        """Rows of `seqs`, int64 `[n]`. Most steps have the sequences of the step before."""
        if seqs != self._last_seqs:
            self._last_seqs = list(seqs)
            self._rows = np.array([seq.row for seq in seqs], dtype=np.int64)
        return self._rows
