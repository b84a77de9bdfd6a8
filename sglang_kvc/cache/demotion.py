"""Demotion: packed blocks move to a lower format when memory is short."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from ..policies.ladder import next_lower, step_cost
from .blocks import State
from .sequence import Sequence

if TYPE_CHECKING:
    from .runtime import Runtime


class Demotion:
    """Chooses blocks that may move to a lower format, and queues the moves. Nothing here asks the device.

    lower: int64 `[formats]`, the format id that blocks at each format id move to, 0 for none. Formats that requests
    name have no lower one, so a block's format id says whether it may move.
    lowest: int64 `[formats]`, the format id at which these moves end.
    cost: by format id that has a lower one, high first: loss per page of the move. A lower step costs more.
    """

    def __init__(self, runtime: Runtime):
        self.runtime = runtime
        formats = runtime.store.block_formats
        self.lower = np.array(next_lower(formats, runtime.policy.ladder), dtype=np.int64)
        self.pages = np.array([f.pages for f in formats], dtype=np.int64)
        self.cost = {tier: step_cost(formats[tier], formats[low]) for tier, low in enumerate(self.lower) if low}
        self.enabled = bool(self.cost)
        self.lowest = np.arange(len(formats))
        while (below := self.lower[self.lowest]).any():
            self.lowest = np.where(below > 0, below, self.lowest)

    def tier_of(self, ids: np.ndarray) -> int:
        """Format id of the highest tier at which one of the blocks `ids` may move down; 0 if none may."""
        movable = self._movable(ids)
        return int(self.runtime.blocks.format_id[movable].min()) if len(movable) else 0

    def _movable(self, ids: np.ndarray) -> np.ndarray:
        blocks = self.runtime.blocks
        packed = (blocks.state[ids] == State.PACKED) & (blocks.window_count[ids] == 0)
        return ids[packed & (self.lower[blocks.format_id[ids]] > 0)]

    def demote(self, ids: np.ndarray, pages: int) -> int:
        """Move blocks one step down: among `ids` (distinct), those at the highest tier, the last ones first, until
        `pages` pages are freed. Returns the number of freed pages."""
        tier = self.tier_of(ids)
        if not tier or pages <= 0:
            return 0
        to = int(self.lower[tier])
        movable = self._movable(ids)
        movable = movable[self.runtime.blocks.format_id[movable] == tier]
        freed = int(self.pages[tier] - self.pages[to])
        needed = -(-pages // freed)
        due = movable[-needed:]
        self.runtime.queue_move(due, from_format=tier, to_format=to, lengths=np.zeros_like(due))
        self.runtime.counters.demoted_blocks += len(due)
        return freed * len(due)

    def demote_running(self, seqs: Iterable[Sequence], tokens: int, *, evict: bool = False) -> bool:
        """Move blocks of running requests until `tokens` more tokens can be taken, highest tier first; whether any
        moved. All of them are in use, so the cheapest step comes first. `evict`: can be taken after evicting all
        unlocked blocks."""
        ids, capacity, moved = self._running(seqs), self.runtime.capacity, False
        while self.demote(ids, capacity.missing_pages(tokens, evict=evict)):
            moved = True
        return moved

    def spare_pages(self, seqs: Iterable[Sequence]) -> int:
        """Pages that the blocks of running requests free if all of them move to the floor."""
        formats = self.runtime.blocks.format_id[self._movable(self._running(seqs))]
        return int((self.pages[formats] - self.pages[self.lowest[formats]]).sum())

    @staticmethod
    def _running(seqs: Iterable[Sequence]) -> np.ndarray:
        """Blocks of running requests before their windows. Blocks of one-shot requests never move."""
        seqs = [seq for seq in seqs if seq.one_shot is None]
        return np.unique(np.array([b for seq in seqs for b in seq.blocks[: seq.window_start]], dtype=np.int64))
