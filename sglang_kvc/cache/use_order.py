"""Order of the disk tier's files: the least recently used one goes first, and of one prompt the last block."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

BLOCK_NS = 1000  # in one use of a prompt, each block counts as used this much earlier than the block before it


class UseOrder:
    """Keys and their last uses, in nanoseconds since the epoch.

    A use only rises. `_queue` is a heap with at least one entry per key, whose use may be outdated. Only entries that
    come to its front are corrected, so a touch costs one entry of a dictionary per key.
    """

    def __init__(self, uses: Iterable[tuple[int, bytes]] = ()):
        self._queue = sorted(uses)
        self.uses = {key: use for use, key in self._queue}
        self._touched: set[bytes] = set()

    def __getitem__(self, key: bytes) -> int:
        return self.uses[key]

    def add(self, key: bytes, use: int) -> None:
        self.uses[key] = use
        heapq.heappush(self._queue, (use, key))

    def remove(self, key: bytes) -> None:
        self.uses.pop(key, None)
        if len(self._queue) > 2 * len(self.uses) + 100:  # most entries are of removed keys
            self._queue = sorted((use, key) for key, use in self.uses.items())

    def touch(self, keys: Sequence[bytes], use: int) -> None:
        """Note a use of adjacent blocks of a prompt, of the first one at `use`. Unknown keys are skipped."""
        uses = self.uses
        for key in keys:
            if uses.get(key, use) < use:
                uses[key] = use
            use -= BLOCK_NS
        self._touched.update(keys)

    def take_touched(self) -> set[bytes]:
        """Keys that were touched since the last call. Some may be unknown."""
        touched, self._touched = self._touched, set()
        return touched

    def settle(self, corrections: int = 100) -> bool:
        """Correct outdated entries at the front of the queue; returns whether none is left there. It stops after
        `corrections` of them, so that a caller with a lock can let other threads in between."""
        for _ in range(corrections):
            if not self._queue or self._queue[0][0] == self.uses.get(self._queue[0][1]):
                return True
            key = self._queue[0][1]
            if key in self.uses:
                heapq.heapreplace(self._queue, (self.uses[key], key))
            else:
                heapq.heappop(self._queue)
        return False

    def oldest(self) -> bytes | None:
        """The least recently used key, after `settle` has returned True; None if there is none."""
        return self._queue[0][1] if self._queue else None
