"""Demotion queue: the unlocked nodes of the radix tree whose blocks may move to a lower format, coldest first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .tree_eviction import EvictionQueue

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from ..cache.demotion import Demotion
    from .tree_component import BlockComponent


class DemotionQueue(EvictionQueue):
    """Nodes in the order (tier, last access): all blocks of the tree move down one tier before any moves down two.

    A node enters when its lock ends and leaves when it is locked or evicted. A node leaves at the top of the heap if
    all of its blocks are at the floor or also in host memory. A demotion takes logarithmic time per node.
    """

    def __init__(self, demotion: Demotion, component: BlockComponent):
        super().__init__(self._rank)
        self.demotion, self.component = demotion, component

    def add(self, node: UnifiedTreeNode) -> None:
        if self.demotion.enabled:
            super().add(node)

    def _rank(self, node: UnifiedTreeNode) -> tuple[float, float]:
        """Rank of a node; nodes without a block to demote come last."""
        tier = self.demotion.tier_of(self.component.blocks_of(node)) if not node.backuped else 0
        return tier or float("inf"), node.last_access_time

    def make_room(self, tokens: int) -> None:
        """Demote until `tokens` more tokens can be taken, or nothing is left to demote.

        Within a node the last blocks move first: the first ones are the prefix of more prompts."""
        capacity = self.demotion.runtime.capacity
        while (pages := capacity.missing_pages(tokens)) > 0 and (node := self.next()) is not None:
            # A node that is also in host memory can release its pages without loss.
            if node.backuped or not self.demotion.demote(self.component.blocks_of(node), pages):
                self.discard(node)
