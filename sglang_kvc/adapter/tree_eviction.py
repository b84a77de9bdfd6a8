"""Eviction queue: the evictable leaves of the radix tree in the order of eviction."""

from __future__ import annotations

import heapq
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode


class EvictionQueue(set):
    """SGLang's set `evictable_device_leaves` with a heap over it, which finds the next leaf in logarithmic time.

    Heap entries are (priority, leaf), lowest priority first. A leaf that is locked or evicted leaves a stale entry, and
    a leaf that is used again keeps an old priority. A use can only raise the priority, so both are detected when the
    entry reaches the top. Leaves of equal priority come in an order that is the same on all tensor-parallel ranks.
    """

    def __init__(self, priority: Callable[[UnifiedTreeNode], Any]):
        super().__init__()
        self.priority = priority
        self.heap: list[tuple[Any, UnifiedTreeNode]] = []

    def add(self, leaf: UnifiedTreeNode) -> None:
        super().add(leaf)
        if len(self.heap) > 2 * len(self) + 64:
            self.heap = [(self.priority(x), x) for x in sorted(self, key=attrgetter("id"))]
            heapq.heapify(self.heap)
        else:
            heapq.heappush(self.heap, (self.priority(leaf), leaf))

    def clear(self) -> None:
        super().clear()
        self.heap.clear()

    def next(self) -> UnifiedTreeNode | None:
        """Return the leaf to evict first, None if the queue is empty; the caller evicts it."""
        while self.heap:
            priority, leaf = self.heap[0]
            if leaf not in self:
                heapq.heappop(self.heap)
            elif (now := self.priority(leaf)) != priority:
                heapq.heapreplace(self.heap, (now, leaf))
            else:
                return leaf
        return None


class ScannedLeaves(set):
    """The same set for policies in which the use of one leaf lowers the rank of others, like `tlru`. It scans all
    leaves for the next one, as SGLang's own tree does."""

    def __init__(self, priority: Callable[[UnifiedTreeNode], Any]):
        super().__init__()
        self.priority = priority

    def next(self) -> UnifiedTreeNode | None:
        """Return the leaf to evict first, None if there is none; the caller evicts it."""
        return min(self, key=self.priority, default=None)
