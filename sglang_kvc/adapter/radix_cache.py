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

    def __getitem__(self, idx) -> BlockKey:
        part = super().__getitem__(idx)
        return BlockKey(part.token_ids, part.extra_key)

    def child_key(self, page_size: int = 1):
        plain = self.token_ids[:page_size].tobytes()
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

    def is_chunk_cache(self) -> bool:
        return False

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
            self._record_remove_event(leaf)
        if gone:
            runtime.free(np.concatenate(gone))
            runtime.counters.evicted_blocks += blocks
            self.update_eviction_metrics(evicted, began)
        return EvictResult(num_tokens_evicted=evicted)

    def match_prefix(self, params: MatchPrefixParams):
        key = params.key
        return super().match_prefix(replace(params, key=BlockKey(key.token_ids, key.extra_key, limit=key.limit)))

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

    def _insert_blocks(self, req, key: RadixKey, slots: torch.Tensor, blocks: list[int], chunked: bool) -> int:
        """Insert `key`; its new part takes over `blocks`. Returns the length that the tree had already, in tokens."""
        params = InsertParams(key=key, value=slots, chunked=chunked, priority=getattr(req, "priority", 0) or 0)
        result = self.insert(params)
        if result.prefix_len < len(key):
            leaf = result.last_device_node
            leaf.blocks = np.asarray(blocks[result.prefix_len // self.page_size :], dtype=np.int64)
            self.runtime.ledger.set_idle(leaf.blocks, True)
        return result.prefix_len

    # ---- requests

    def cache_finished_req(self, req, is_insert: bool = True, *, kv_len_to_handle: int) -> None:
        """End a request (finished, retracted or aborted): the tree keeps its full blocks, the rest is freed.

        All blocks of a private request (`--kvc-trust salt`) are freed when it finishes, since no other request finds
        them. A retracted request has not finished and finds its blocks again."""
        seq: Sequence = req.kvc
        seq.release()
        private = getattr(req, "kvc_private", False) and (is_insert or req.finished())
        kept, due = seq.shared, [] if private else seq.blocks[: seq.shared]
        if is_insert and not private and not self.disable and not self.disable_finished_insert:
            key = self._key(req, (req.origin_input_ids + req.output_ids)[:kv_len_to_handle])
            n = len(key) // self.page_size
            row = self._row(req, len(key))
            matched = self._insert_blocks(req, key, row, seq.blocks[:n], chunked=False) // self.page_size
            self.runtime.free(seq.blocks[seq.shared : matched])
            kept, due = n, due + seq.blocks[max(matched, seq.shared) : n]
        self.runtime.tokens_written(seq, self._decoded(req), Phase.END, kept=due)
        self.runtime.free(seq.blocks[kept:])
        req.kvc = None
        if not self.disable and req.last_node is not None:
            self.dec_lock_ref(req.last_node)
            if private:
                self._drop_path(req.last_node)

    def _drop_path(self, node: TreeNode) -> None:
        """Free the blocks from `node` up to the first node that another request uses."""
        while node is not self.root_node and node.lock_ref == 0 and not node.children:
            self.runtime.free(node.blocks)
            self._delete_leaf(node)
            self._record_remove_event(node)
            node = node.parent

    def cache_unfinished_req(self, req, chunked: bool = False) -> None:
        """End a prefill or a chunk: the tree takes the full blocks, and the request's row follows the tree."""
        seq: Sequence = req.kvc
        tokens = req.get_fill_ids()
        row = self._row(req, len(tokens))
        if self.disable:
            req.prefix_indices = row
        else:
            key = self._key(req, tokens)
            n = len(key) // self.page_size
            self._insert_blocks(req, key, row[: len(key)], seq.blocks[:n], chunked)
            match = self.match_prefix(MatchPrefixParams(key=key))
            slots, node = match.device_indices, match.last_device_node
            assert len(slots) == len(key), f"{len(slots)=}, {len(key)=}"
            duplicates = seq.replace_with_shared(self.path_blocks(node))
            if duplicates:
                done = req.cache_protected_len
                self.req_to_token_pool.write((req.req_pool_idx, slice(done, len(slots))), slots[done:])
                self.runtime.free(duplicates)
            req.cache_protected_len = len(slots)
            self.dec_lock_ref(req.last_node)
            self.inc_lock_ref(node)
            req.last_node = node
            req.prefix_indices = torch.cat([slots, row[len(slots) :]]) if len(slots) < len(row) else slots
        self.runtime.tokens_written(seq, len(tokens), Phase.CHUNK if chunked else Phase.PREFILL)

    def _key(self, req, tokens) -> RadixKey:
        return BlockKey(tokens, req.extra_key).page_aligned(self.page_size)

    def _row(self, req, n: int) -> torch.Tensor:
        return self.req_to_token_pool.req_to_token[req.req_pool_idx, :n].to(torch.int64, copy=True)

    @staticmethod
    def _decoded(req) -> int:
        """Length of the sequence if it has generated a token, else 0 (the prompt phase)."""
        return len(req.origin_input_ids) + len(req.output_ids) if req.output_ids else 0
