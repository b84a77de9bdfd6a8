"""Radix tree over blocks: SGLang's matching and eviction order, with the block ids of every node on the CPU."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    EvictResult,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode

from ..cache.runtime import NO_BLOCKS, Phase, Runtime
from ..cache.sequence import Sequence
from .eviction_queue import EvictionQueue


class BlockKey(RadixKey):
    """SGLang's key, whose child key is bytes instead of a tuple of Python ints: a fifth of the memory at 128 tokens per
    block."""

    __slots__ = ()

    @classmethod
    def of(cls, key: RadixKey) -> BlockKey:
        return cls(key.token_ids, key.extra_key, limit=key.limit, cache_salt=key.cache_salt)

    def __getitem__(self, idx) -> BlockKey:
        return BlockKey.of(super().__getitem__(idx))

    def child_key_at(self, offset: int, page_size: int = 1):
        plain = self.token_ids[offset : offset + page_size].tobytes()
        if self.cache_salt is not None:
            return (self.extra_key, self.cache_salt), plain
        return plain if self.extra_key is None else (self.extra_key, plain)


class KvcRadixCache(RadixCache):
    """Every node carries `node.blocks`, int64 numpy `[len(key) / P]`; a split slices it and moves no page.

    `evictable_size` is physical: what eviction adds to the allocator's `available_size`. `evictable_size_` stays the
    exact virtual count that SGLang's leak check compares with the slots in use.
    """

    def __init__(self, params, runtime: Runtime):
        self.runtime = runtime
        super().__init__(params)
        self.evictable_leaves = EvictionQueue(lambda leaf: self.eviction_strategy.get_priority(leaf))

    # ---- stock interface, physical view

    def evictable_size(self) -> int:
        return self.runtime.capacity.evictable_tokens()

    def reset(self) -> None:
        super().reset()
        self.root_node.blocks = NO_BLOCKS
        self.runtime.reset()

    def evict(self, params: EvictParams) -> EvictResult:
        """Drop unlocked leaves in the eviction policy's order until the memory is free."""
        if self.disable:
            return EvictResult()
        began = time.perf_counter()
        runtime, capacity = self.runtime, self.runtime.capacity
        evicted, gone, blocks, pages = 0, [], 0, 0
        goal = capacity.eviction_goal(params.num_tokens)
        while capacity.available_tokens(pages, blocks) < goal and (leaf := self.evictable_leaves.next()) is not None:
            gone.append(leaf.blocks)
            blocks += len(leaf.blocks)
            pages += int(runtime.ledger.charge[leaf.blocks].sum())
            evicted += len(leaf.key)
            self._delete_leaf(leaf)  # may make its parent a leaf
            self.kv_events.record_remove(leaf)
        if gone:
            runtime.free(np.concatenate(gone))
            runtime.counters.evicted_blocks += blocks
            self.update_eviction_metrics(evicted, began)
        return EvictResult(num_tokens_evicted=evicted)

    def match_prefix(self, params: MatchPrefixParams):
        return super().match_prefix(replace(params, key=BlockKey.of(params.key)))

    # ---- locks decide what is evictable

    def inc_lock_ref(self, node: TreeNode):
        self._mark(node, locked_when=0, idle=False)
        return super().inc_lock_ref(node)

    def dec_lock_ref(self, node: TreeNode, params=None):
        self._mark(node, locked_when=1, idle=True)
        return super().dec_lock_ref(node, params)

    def _mark(self, node: TreeNode | None, *, locked_when: int, idle: bool) -> None:
        """Tell the ledger which blocks become evictable or locked when the path to `node` is (un)locked once."""
        if self.disable:
            return
        changed = []
        while node is not None and node is not self.root_node:
            if node.lock_ref == locked_when:
                changed.append(node.blocks)
            node = node.parent
        if changed:
            self.runtime.ledger.set_idle(np.concatenate(changed), idle)

    # ---- node payload

    def path_blocks(self, node: TreeNode | None) -> np.ndarray:
        """Block ids from the root to `node`."""
        parts = []
        while node is not None and node is not self.root_node:
            parts.append(node.blocks)
            node = node.parent
        return np.concatenate(parts[::-1]) if parts else NO_BLOCKS

    def _split_node(self, key: RadixKey, child: TreeNode, split_len: int) -> TreeNode:
        upper = super()._split_node(key, child, split_len)
        at = split_len // self.page_size
        upper.blocks, child.blocks = child.blocks[:at], child.blocks[at:]
        return upper

    def _insert_blocks(self, req, key: RadixKey, slots: torch.Tensor, blocks: list[int]) -> int:
        """Insert `key`; its new part takes over `blocks`. Returns the length that the tree had already, in tokens."""
        inserted = req.kv.cache_inserted_len
        result = self.insert(InsertParams(key=key, value=slots, inserted_len=inserted, priority=req.priority or 0))
        req.kv.cache_inserted_len = max(inserted, len(key))
        if result.prefix_len < len(key):
            leaf = result.last_device_node
            leaf.blocks = np.asarray(blocks[result.prefix_len // self.page_size :], dtype=np.int64)
            self.runtime.ledger.set_idle(leaf.blocks, True)
        return result.prefix_len

    # ---- requests

    def checkpoint(self, req, *, up_to: int) -> None:
        """Insert the full blocks of the first `up_to` tokens. The request then goes on in the tree's blocks.

        SGLang checkpoints a request after each chunk, after its prefill, and when it finishes.
        """
        seq: Sequence = req.kvc
        tokens, done = req.full_untruncated_fill_ids[:up_to], req.finished()
        if not self.disable and not (done and req.kvc_private):
            self._follow_tree(req, BlockKey(tokens, req.extra_key, cache_salt=req.cache_salt))
        if not done:
            chunk = up_to < len(req.full_untruncated_fill_ids)
            self.runtime.tokens_written(seq, up_to, Phase.CHUNK if chunk else Phase.PREFILL)

    def _follow_tree(self, req, key: RadixKey) -> None:
        """Insert the full blocks of `key`, and read those from the tree that it had already."""
        seq: Sequence = req.kvc
        key = key.page_aligned(self.page_size)
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, : len(key)].to(torch.int64, copy=True)
        self._insert_blocks(req, key, row, seq.blocks[: len(key) // self.page_size])
        node = self.match_prefix(MatchPrefixParams(key=key)).last_device_node
        path = self.path_blocks(node)
        assert len(path) * self.page_size == len(key), f"{len(path)=}, {len(key)=}"
        duplicates = seq.replace_with_shared(path)
        if duplicates:
            known = req.kv.cache_protected_len
            slots = self.path_device_indices(node)[known:]
            self.req_to_token_pool.write((req.kv.req_pool_idx, slice(known, len(key))), slots)
            self.runtime.free(duplicates)
        req.kv.cache_protected_len = len(key)
        self.unlock(req.lock)
        req.lock = self.lock(node)
        req.last_node = node

    def free_kv_row(self, kv, ranges) -> None:
        """Do nothing: a request's blocks are freed by id when it is released."""

    def on_release(self, req, *, checkpointed: bool) -> None:
        """End a request (finished, retracted or aborted): the tree keeps what it took over, the rest is freed.

        All blocks of a private request (`--kvc-trust salt`) are freed when it finishes, since no other request finds
        them. A retracted request has not finished and finds its blocks again."""
        seq: Sequence = req.kvc
        shared = seq.shared
        seq.release()
        private = req.kvc_private and (checkpointed or req.finished())
        self.runtime.tokens_written(seq, self._decoded(req), Phase.END, kept=[] if private else seq.blocks[:shared])
        self.runtime.free(seq.blocks[shared:])
        req.kvc = None
        if private and not self.disable:
            self._drop_path(req.last_node)

    def _drop_path(self, node: TreeNode) -> None:
        """Free the blocks from `node` up to the first node that another request uses."""
        while node is not self.root_node and node.lock_ref == 0 and not node.children:
            self.runtime.free(node.blocks)
            self._delete_leaf(node)
            self.kv_events.record_remove(node)
            node = node.parent

    @staticmethod
    def _decoded(req) -> int:
        """Length of the sequence if it has generated a token, else 0 (the prompt phase)."""
        return len(req.origin_input_ids) + len(req.output_ids) if req.output_ids else 0
