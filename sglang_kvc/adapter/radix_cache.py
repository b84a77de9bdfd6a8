"""Radix tree over blocks: SGLang's unified tree, with the block ids of every node on the CPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, EvictResult, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from ..cache.blocks import NO_BLOCKS
from ..cache.packing import Phase, tokens_written
from ..cache.runtime import Runtime
from ..cache.sequence import Sequence
from ..options.config import REUSE
from .block_key import BlockKey, block_hashes
from .streaming import StreamingCache
from .tree_component import BlockComponent
from .tree_disk import DiskCache
from .tree_eviction import EvictionQueue, ScannedLeaves
from .tree_host import FULL
from .tree_match import match_again
from .tree_reuse import ReuseOrder


class KvcRadixCache(DiskCache, StreamingCache):
    """Nodes own blocks through `BlockComponent`; requests own theirs through `req.kvc`.

    `evictable_size` is physical: what eviction adds to the allocator's `available_size`. `evictable_slots` is the exact
    virtual count that SGLang's leak check compares with the slots in use.
    """

    _drops_private = False

    def __init__(self, params):
        self.runtime: Runtime = params.token_to_kv_pool_allocator.runtime
        super().__init__(
            replace(params, tree_components=(FULL,), component_registry_override={FULL: BlockComponent})
        )

    # ---- stock interface, physical view

    def evictable_size(self) -> int:
        return self.runtime.capacity.evictable_tokens()

    def evictable_slots(self) -> int:
        return self.tree_core.evictable_size()

    def reset(self) -> None:
        super().reset()
        if self.runtime.config.eviction == REUSE and not self.disable:
            self.tree_core.eviction_strategy = self.reuse = ReuseOrder(self)
        leaves = ScannedLeaves if self.tree_core.tlru_bookkeeping else EvictionQueue
        self.tree_core.evictable_device_leaves = leaves(self.component.priority)
        self.tree_core.evictable_host_leaves = leaves(self.component.priority)
        self.component.demotions.clear()
        self.runtime.reset()

    def evict(self, params: EvictParams) -> EvictResult:
        """Demote cold blocks, then drop unlocked leaves in eviction order, until the memory is free."""
        return self.evict_for_alloc(params)

    def evict_for_alloc(self, params: EvictParams, *, allocation_reclaim_satisfied=None) -> EvictResult:
        capacity = self.runtime.capacity
        goal = capacity.eviction_goal(params.num_tokens)
        if goal <= capacity.reachable_tokens():  # otherwise all blocks that could be demoted are dropped anyway
            self.component.demotions.make_room(goal)
        missing = goal - capacity.available_tokens()
        if missing <= 0:
            return EvictResult()
        result = super().evict_for_alloc(EvictParams(num_tokens=missing))
        self.runtime.counters.evicted_blocks += result.num_tokens_evicted // self.page_size
        return result

    def _evict_components(self, *args, **kwargs) -> None:
        with self.component.evicted.open():
            super()._evict_components(*args, **kwargs)

    def _component_available_size(self, component_type: ComponentType) -> int:
        return self.component.evicted.available_tokens

    # ---- keys

    def insert(self, params: InsertParams):
        return super().insert(replace(params, key=BlockKey.of(params.key)))

    def touch_prefix(self, key: RadixKey) -> None:
        super().touch_prefix(BlockKey.of(key))

    def _match_tree(self, params: MatchPrefixParams):
        params = replace(params, key=BlockKey.of(params.key))
        result = None if self.disable else match_again(self, params)
        if result is None:
            result = super()._match_tree(params)
        if params.req is not None:
            params.req.kvc_match_end = result.best_match_node
        return result

    # ---- prompts whose prefixes were dropped

    def note_dropped(self, node) -> None:
        """A leaf has left the tree. No prompt continues blocks of a private request."""
        if not self._drops_private:
            blocks = [*block_hashes(node.key, 0, self.page_size, self._path_hash(node.parent))]
            memory = self.runtime.capacity.packed_capacity / self.page_size
            self.runtime.running_share.drop(blocks, memory)

    def note_admitted(self, req) -> None:
        """A prompt is computed from token `req.prefix_len` on. It does not count again when it resumes after a
        retraction, which shows that answers are short of memory, not that sessions are."""
        tokens, begin, share = req.full_untruncated_fill_ids, req.prefix_len, self.runtime.running_share
        if not len(tokens) or getattr(req, "kvc_noted", False):
            return
        req.kvc_noted = True
        key = BlockKey(tokens, req.extra_key, cache_salt=req.cache_salt)
        prefix = self._path_hash(self.tree_core.node_by_id(req.last_node))
        again = self.page_size * share.ghosts.take(block_hashes(key, begin, self.page_size, prefix))
        self.runtime.counters.recomputed_tokens += again
        share.admit(len(tokens), len(tokens) - begin, again, self.runtime.capacity.packed_capacity)

    def _path_hash(self, node) -> int:
        """Hash of all tokens up to the end of `node`. Nodes keep it: a split changes only where a node begins."""
        prefix = 0
        for part in self._path(node):
            known = getattr(part, "kvc_path_hash", None)
            if known is None:
                *_, known = block_hashes(part.key, 0, self.page_size, prefix)
                part.kvc_path_hash = known
            prefix = known
        return prefix

    # ---- paths

    def path_blocks(self, node_id: int) -> np.ndarray:
        """Block ids from the root to the node, int64."""
        path = self._path(self.tree_core.node_by_id(node_id))
        return np.concatenate([NO_BLOCKS, *map(self.component.blocks_of, path)])

    def prefix_device_indices(self, req) -> torch.Tensor:
        return self.path_device_indices(req.last_node)[: req.prefix_len]

    def path_device_indices(self, node: int) -> torch.Tensor:
        return self.runtime.store.upload(self.component.slots_of(self.path_blocks(node)))

    # ---- requests

    def checkpoint_into_tree(self, req, *, up_to: int, **kwargs) -> None:
        """Insert the full blocks of the first `up_to` tokens. The request then continues in the tree's blocks.

        SGLang checkpoints a request after each chunk, after its prefill, and when it finishes. With
        `--strip-thinking-cache` a finished request inserts only its prompt; blocks beyond it that were already in the
        tree stay there. Blocks of a one-shot prompt never enter the tree.
        """
        seq: Sequence = req.kvc
        up_to = max(up_to, req.kv.cache_protected_len)
        tokens, done = req.full_untruncated_fill_ids[:up_to], req.finished()
        if not self.disable and seq.one_shot is None and not (done and req.kvc_private):
            self._follow_tree(req, BlockKey(tokens, req.extra_key, cache_salt=req.cache_salt))
            if self.reuse is not None:
                self.reuse.checkpoint(req)
                if done:
                    self.reuse.end(req)
            if done and not isinstance(req.finished_reason, FINISH_ABORT):
                self.register_session(req)
        if not done:
            all_tokens = len(req.full_untruncated_fill_ids)
            probe = seq.probe_tokens(req.prefix_len, up_to, all_tokens)
            tokens_written(self.runtime, seq, up_to - probe, Phase.CHUNK if up_to < all_tokens else Phase.PREFILL)
            if probe:
                self._take_back(req, up_to - probe)

    def _take_back(self, req, length: int) -> None:
        """Let the next chunk of `req` begin after its first `length` tokens."""
        self.runtime.cut(req.kvc, length)
        req.extend_end = req.already_computed = length
        req.kv.kv_allocated_len = req.kv.kv_committed_len = length

    def keep_retracted(self, req) -> None:
        """Insert the full blocks of a request that is about to be retracted. They are packed and can be evicted like
        any others. When the request resumes, it hits those that are still there.

        A one-shot prompt inserts nothing and is computed again from its first token."""
        if self.disable or req.kvc is None or req.kvc.one_shot is not None:
            return
        req.kvc_keeps_row = False
        req.kvc_prefetched = req.kvc_least_room = None
        req.refresh_fill_ids()
        written = req.full_untruncated_fill_ids[: req.kv.kv_committed_len]
        self._follow_tree(req, BlockKey(written, req.extra_key, cache_salt=req.cache_salt))
        req.kvc_fetched = False  # its blocks may leave for the disk before it resumes
        if self.reuse is not None:
            self.reuse.interrupt(req)

    def _follow_tree(self, req, key: BlockKey) -> None:
        """Insert the full blocks of `key`, and take over the blocks that the tree already had."""
        seq: Sequence = req.kvc
        key = key.page_aligned(self.page_size)
        inserted = self.insert(
            InsertParams(
                key=key,
                value=self.component.slots_of(seq.blocks[: len(key) // self.page_size]),
                prev_prefix_len=len(key),  # the tree does not free duplicates: they are freed by id below
                inserted_len=req.kv.cache_inserted_len,
                priority=req.priority or 0,
                session_id=req.session_id,
            )
        )
        req.kv.cache_inserted_len = max(req.kv.cache_inserted_len, len(key))
        node = inserted.last_device_node
        path = self.path_blocks(node)
        assert len(path) * self.page_size == len(key), f"{len(path)=}, {len(key)=}"
        duplicates = seq.replace_with_shared(path)
        if duplicates:
            known = req.kv.cache_protected_len
            slots = self.path_device_indices(node)[known:]
            self.req_to_token_pool.write((req.kv.req_pool_idx, slice(known, len(key))), slots)
            self.runtime.free(duplicates)
        req.kv.cache_protected_len = len(key)
        earlier, req.lock = req.lock, self.lock(node)  # lock first: no block of the path becomes idle in between
        self.unlock(earlier)
        req.last_node = node

    def free_kv_row(self, kv, ranges) -> None:
        """Do nothing: a request's blocks are freed by id when it is released."""

    def on_release(self, req, *, checkpointed: bool) -> None:
        """End a request (finished, retracted or aborted): the tree keeps the blocks that it took over, and the others
        are freed.

        All blocks of a private request (`--kvc-trust`) are freed when it finishes, since no other request finds
        them. A retracted request has not finished and finds its blocks again."""
        seq: Sequence = req.kvc
        shared, length = seq.shared, self._decoded_length(req)
        seq.release()
        private = req.kvc_private and (checkpointed or req.finished())
        tokens_written(self.runtime, seq, length, Phase.END, kept=[] if private else seq.blocks[:shared])
        self.runtime.free_sequence(seq)
        req.kvc = None
        self.end_turn(req)
        if self.reuse is not None and req.finished():
            self.reuse.end(req)
        if private and not self.disable:
            self._drops_private = True
            self._drop_path(req.last_node)
            self._drops_private = False
        elif checkpointed and not self.disable:
            self.back_up(req.last_node)

    def _drop_path(self, node_id: int) -> None:
        """Free the blocks of the node and of its ancestors, up to the first node that another request uses."""
        core = self.tree_core
        while not core.is_root(node_id) and (node := core.node_by_id(node_id)) in core.evictable_device_leaves:
            if not self._drop_stored_below(node):
                return
            parent = node.parent.id
            self._apply_eviction_result(core.evict_device_leaf(node_id, is_write_back=False))
            if node.backuped:
                self._drop_stored_leaf(node)
            node_id = parent

    @staticmethod
    def _decoded_length(req) -> int:
        """Length of the sequence if a step has decoded a token, else 0 (the prompt phase).

        The last output token is never written. The result is the same with and without overlap scheduling. Overlap runs
        one more step of a request that has finished; that step does not count. When a request is retracted, its last
        step counts even if its result is not processed yet, because that step also runs without overlap."""
        if not req.finished():
            return req.kvc.length + 1 if req.kvc.decoding else 0
        length = len(req.origin_input_ids) + len(req.output_ids)
        return length if min(req.kvc.length, length - 1) > req.kvc.prompt else 0
