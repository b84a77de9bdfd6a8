"""Ledger: the CPU's charge in pages for every block, never below the device's count on any rank."""

from __future__ import annotations

import numpy as np


class Ledger:
    """Page charges of all blocks and running totals. Nothing here asks the device.

    `limit` is the number of pages that may be charged at once: all pages less the scratch page and the reserve that
    compactions draw on. A block is charged its uncompressed size at allocation. When its compaction is queued it is
    charged the result if that is fixed, else the upper bound until the count comes back.
    """

    def __init__(self, num_blocks: int, limit: int):
        self.limit = limit
        self.charge = np.zeros(num_blocks, dtype=np.int64)
        self.idle = np.zeros(num_blocks, dtype=bool)  # in unlocked tree nodes only: evictable
        self.total = 0
        self.idle_total = 0
        self.idle_blocks = 0

    @property
    def free(self) -> int:
        """Pages that can be charged now."""
        return self.limit - self.total

    @property
    def reachable(self) -> int:
        """Pages that can be charged after evicting all unlocked blocks."""
        return self.free + self.idle_total

    def set(self, blocks: np.ndarray, pages: int | np.ndarray) -> None:
        """Charge each of `blocks` (distinct ids) with `pages`."""
        self._add(blocks, pages - self.charge[blocks])

    def lower(self, blocks: np.ndarray, pages: int | np.ndarray) -> None:
        """Charge each of `blocks` (distinct ids) with `pages` at most."""
        self._add(blocks, np.minimum(pages - self.charge[blocks], 0))

    def _add(self, blocks: np.ndarray, pages: np.ndarray) -> None:
        self.charge[blocks] += pages
        self.total += int(pages.sum())
        self.idle_total += int(pages.dot(self.idle[blocks]))

    def take(self, blocks: np.ndarray, pages: int) -> None:
        """Charge each of `blocks`, which were free, `pages` pages."""
        self.charge[blocks] = pages
        self.total += pages * len(blocks)

    def set_idle(self, blocks: np.ndarray, idle: bool) -> None:
        """Mark `blocks` as evictable or not. Blocks that already have this mark do not change."""
        change = blocks[self.idle[blocks] != idle]
        pages = int(self.charge[change].sum())
        sign = 1 if idle else -1
        self.idle[change] = idle
        self.idle_total += sign * pages
        self.idle_blocks += sign * len(change)

    def drop(self, blocks: np.ndarray) -> None:
        """Clear the charges of `blocks`, which are free again."""
        self.set_idle(blocks, False)
        self.set(blocks, 0)

    def reset(self) -> None:
        self.charge[:] = 0
        self.idle[:] = False
        self.total = self.idle_total = self.idle_blocks = 0
