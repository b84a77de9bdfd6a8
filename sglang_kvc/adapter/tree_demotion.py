"""Demotion queue: the unlocked nodes of the radix tree whose blocks may move to a lower format, least expected loss
first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..cache.reuse import rank_of
from .tree_eviction import EvictionQueue

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from ..cache.demotion import Demotion
    from .tree_component import BlockComponent


class DemotionQueue:
    """Nodes in the order of the expected loss per page of their next step: its cost times the chance of a next use.

    queues: by tier, high first: the nodes whose blocks leave that tier next, coldest first. The step that loses least
        is that of the coldest node of a queue.

    A node enters the first queue when its lock ends, and moves on to the queue of its tier when it is the coldest
    there. Until then a colder node can take a cheaper step. It leaves when it is locked or evicted, or when it is the
    coldest and all of its blocks are at the floor or also in host memory. A demotion takes logarithmic time per node.
    """

    def __init__(self, demotion: Demotion, component: BlockComponent):
        self.demotion, self.component = demotion, component
        self.queues = {tier: EvictionQueue(self._rank) for tier in demotion.cost}

    def __contains__(self, node: UnifiedTreeNode) -> bool:
        return any(node in queue for queue in self.queues.values())

    def add(self, node: UnifiedTreeNode) -> None:
        if self.queues:
            self.queues[min(self.queues)].add(node)

    def discard(self, node: UnifiedTreeNode) -> None:
        for queue in self.queues.values():
            queue.discard(node)

    def clear(self) -> None:
        for queue in self.queues.values():
            queue.clear()

    def make_room(self, tokens: int) -> None:
        """Demote until `tokens` more tokens can be taken, or nothing is left to demote.

        Within a node the last blocks move first: the first ones are the prefix of more prompts."""
        capacity = self.demotion.runtime.capacity
        while (pages := capacity.missing_pages(tokens)) > 0 and (node := self._next()) is not None:
            self.demotion.demote(self.component.blocks_of(node), pages)

    def _next(self) -> UnifiedTreeNode | None:
        """The node to demote next, None if there is none."""
        heads: list = []
        again = True
        while again:  # a node has moved to a queue whose head was already taken
            heads, again = [], False
            for tier, queue in self.queues.items():
                while (node := queue.next()) is not None and (now := self._tier(node)) != tier:
                    queue.discard(node)
                    if now:
                        self.queues[now].add(node)
                        again |= now < tier
                if node is not None:
                    heads.append((self._loss(tier, node), tier, node))
        return min(heads)[-1] if heads else None

    def _tier(self, node: UnifiedTreeNode) -> int:
        """Tier that blocks of a node leave next, 0 for none. A node that is also in host memory can release its pages
        without loss."""
        return 0 if node.backuped else self.demotion.tier_of(self.component.blocks_of(node))

    def _rank(self, node: UnifiedTreeNode) -> Any:
        """Rank of a node; the lowest is the coldest."""
        return node.last_access_time if self.component.cache.reuse is None else rank_of(node)

    def _loss(self, tier: int, node: UnifiedTreeNode) -> Any:
        """Expected loss per page of moving blocks of `node` out of `tier`, up to a common factor.

        The chance of a use is 1 / age. Ages count accesses to the tree, or forwards with `--kvc-eviction reuse`.
        Each look at a waiting prompt is an access. Tensor-parallel ranks agree on both counts, but not on the time.
        Blocks of finished sessions move before all others, and those of waiting prompts, which are certain to be used,
        after them."""
        cost, reuse = self.demotion.cost[tier], self.component.cache.reuse
        if reuse is None:
            return cost / max(1, self.component.tree_core.root_node.last_access_time - node.last_access_time)
        kind, priority, since = rank_of(node)
        return kind, priority, cost if kind > 0 else cost / max(1, reuse.now - since)
