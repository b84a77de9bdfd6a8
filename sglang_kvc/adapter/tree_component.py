"""Component of SGLang's unified tree that holds blocks. It tells the ledger which blocks are idle and frees blocks by
id."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.srt.mem_cache.unified_cache.cache_action import FreeComponentDeviceSlot
from sglang.srt.mem_cache.unified_cache.components import FullComponent
from sglang.srt.mem_cache.unified_cache.components.base import EvictLayer

from ..cache.reuse import uses_of
from .eviction_batch import EvictionBatch
from .tree_demotion import DemotionQueue

if TYPE_CHECKING:
    from ..cache.runtime import Runtime


def written_at(node) -> int | None:
    """Value of `runtime.cleared` when the node was last saved for the disk; None if it never was."""
    return getattr(node, "kvc_written", None)


class BlockComponent(FullComponent):
    """The full-attention component. A node's device value is int64 `[len(key)]` on the CPU: the slots of its blocks.

    The ledger counts a block as idle while its node is unlocked. A split slices the value and moves no page.
    """

    def __init__(self, cache, params):
        super().__init__(cache, params)
        self.runtime: Runtime = cache.runtime
        self.block_tokens = self.runtime.layout.block_tokens
        self.demotions = DemotionQueue(self.runtime.demotion, self)
        self.evicted = EvictionBatch(self.runtime)

    # ---- values

    def slots_of(self, blocks: list[int] | np.ndarray) -> torch.Tensor:
        """Slots of whole blocks, int64 `[len(blocks) * P]` on the CPU."""
        starts = np.asarray(blocks, dtype=np.int64)[:, None] * self.block_tokens
        return torch.from_numpy((starts + np.arange(self.block_tokens)).ravel())

    def blocks_of(self, node) -> np.ndarray:
        """Block ids of a node, int64."""
        return self.blocks_at(node.component_data[self.component_type].value)

    def blocks_at(self, slots: torch.Tensor) -> np.ndarray:
        """Block ids, int64, of the slots of whole blocks."""
        return slots.numpy()[:: self.block_tokens] // self.block_tokens

    # ---- evictable blocks

    def commit_insert_component_data(self, node, is_new_leaf, params, result, cache_actions) -> None:
        if is_new_leaf:
            self.runtime.ledger.set_idle(self.blocks_of(node), True)
            self.demotions.add(node)

    def acquire_component_lock(self, node, result, lock_host: bool = False):
        if not lock_host:
            self._mark(node, locked_when=0, idle=False)
        return super().acquire_component_lock(node, result, lock_host)

    def release_component_lock(self, node, params, lock_host: bool = False) -> None:
        if not lock_host:
            self._mark(node, locked_when=1, idle=True)
        super().release_component_lock(node, params, lock_host)

    def _mark(self, node, *, locked_when: int, idle: bool) -> None:
        """Tell the ledger which blocks become evictable or locked when the path to `node` is (un)locked once."""
        changed, root = [], self.tree_core.root_node
        while node is not root:
            data = node.component_data[self.component_type]
            if data.lock_ref == locked_when and data.value is not None:
                changed.append(self.blocks_of(node))
                (self.demotions.add if idle else self.demotions.discard)(node)
            node = node.parent
        if changed:
            self.runtime.ledger.set_idle(np.concatenate(changed), idle)

    def redistribute_on_node_split(self, new_parent, child) -> None:
        super().redistribute_on_node_split(new_parent, child)
        if uses := uses_of(child):
            new_parent.kvc_uses = uses
        if (written := written_at(child)) is not None:
            new_parent.kvc_written = written
        data = new_parent.component_data[self.component_type]
        if data.lock_ref == 0 and data.value is not None:
            self.demotions.add(new_parent)

    # ---- eviction

    def discard_deleted_session_leaf(self, node) -> None:
        """Called by SGLang for every node that leaves the tree."""
        super().discard_deleted_session_leaf(node)
        self.cache.note_dropped(node)

    def evict_component(self, node, device_frees, host_frees, cache_actions, target=EvictLayer.DEVICE):
        freed = super().evict_component(node, device_frees, host_frees, cache_actions, target)
        data = node.component_data[self.component_type]
        if EvictLayer.DEVICE in target:
            self.demotions.discard(node)
        elif data.lock_ref == 0 and data.value is not None:  # only the device copy is left
            self.demotions.add(node)
        return freed

    def priority(self, leaf):
        """Rank of a leaf; the lowest is evicted first. Leaves of open sessions rank above all others; within both
        groups the eviction strategy decides."""
        if self.cache.enable_session_radix_cache:
            return self._session_ref_eviction_strategy(leaf)
        return self.tree_core.eviction_strategy.get_priority(leaf)

    def _dec_session_coverage(self, session_id, leaf) -> None:
        super()._dec_session_coverage(session_id, leaf)
        self.queue_again(leaf)

    def _recede_session_coverage(self, session_id, leaf, fallback) -> None:
        super()._recede_session_coverage(session_id, leaf, fallback)
        self.queue_again(leaf)

    def queue_again(self, node) -> None:
        """Enter a node again, whose rank has fallen."""
        for queue in (self.tree_core.evictable_device_leaves, self.demotions):
            if node in queue:
                queue.add(node)

    def _evict_device_start(self, request_cnt: int) -> None:
        self._evict_device_request_cnt = request_cnt

    def _evict_device_next_node(self, tracker, device_frees, host_frees, cache_actions):
        if tracker[self.component_type] >= self._evict_device_request_cnt:
            return None
        leaf = self.tree_core.evictable_device_leaves.next()
        return None if leaf is None else leaf.id

    def _evict_device_end(self) -> None:
        """Do nothing: the queue persists between evictions."""

    # ---- host memory

    def drive_host_eviction(self, num_tokens: int, tracker, device_frees, host_frees, cache_actions) -> None:
        """Drop stored leaves in the order of their queue."""
        core = self.tree_core
        while tracker[self.component_type] < num_tokens and (leaf := core.evictable_host_leaves.next()) is not None:
            core._evict_host_leaf(leaf, tracker, device_frees, host_frees, cache_actions=cache_actions)

    def free_host_values(self, host_values: list[torch.Tensor]) -> None:
        self.runtime.host_tier.free(np.concatenate([self.blocks_at(slots) for slots in host_values]))

    def apply_component_action(self, action) -> None:
        if isinstance(action, FreeComponentDeviceSlot):
            self.evicted.free(np.concatenate([self.blocks_at(slots) for slots in action.indices]))
        else:
            super().apply_component_action(action)
