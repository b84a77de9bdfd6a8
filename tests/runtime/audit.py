"""What must hold after every forward and every turn of the scheduler, recounted from scratch."""

from __future__ import annotations

import numpy as np

from kvc_kernels import ops
from sglang_kvc.adapter.radix_cache import FULL
from sglang_kvc.cache.blocks import State

from . import record
from .model import P, pages_held


def check_device(runtime) -> None:
    """Behind a flush: every page is in one place, and the ledger charges no block less than it holds."""
    ops.check_invariants(runtime.store)
    held, charge = pages_held(runtime.store), runtime.ledger.charge
    assert (held <= charge).all(), "the ledger is below the device"
    exact = [i for i, block_format in enumerate(runtime.store.block_formats) if block_format.exact]
    mine = np.isin(runtime.store.format_id.numpy(), exact) & (np.arange(len(held)) > 0)
    assert (held[mine] == charge[mine]).all(), "a block format of a known size has another"


def check_reads(server, reqs: list) -> None:
    """What the requests read in this forward: their rows name their blocks, which store their tokens."""
    runtime, blocks = server.runtime, {}
    for req in reqs:
        n = req.kv.kv_committed_len
        row = server.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :n]
        mine = req.kvc.blocks
        expected = (np.array(mine).repeat(P) * P)[:n] + np.arange(n) % P
        assert len(mine) == -(-n // P) and (row.numpy() == expected).all(), "a row and its record differ"
        format_ids = set(runtime.store.format_id[mine].tolist())
        assert format_ids <= {
            0, runtime.policy.format_id_of(req.kvc_level)
        }, "a block is at another level than its request"
        for i, block in enumerate(mine):
            tokens = req.history[i * P : min(n, (i + 1) * P)]
            assert blocks.setdefault(block, tokens)[: len(tokens)].tolist() == tokens[: len(blocks[block])].tolist()
            if len(tokens) > len(blocks[block]):
                blocks[block] = tokens
    record.check(runtime.store, blocks, runtime.policy.keeps_all)


def check_tree(server) -> None:
    """All that the tree keeps, with nothing queued: each node stores the tokens of the path to it."""
    blocks, stack = {}, [(server.tree_cache.root_node, [])]
    while stack:
        node, tokens = stack.pop()
        for child in node.children.values():
            path = [*tokens, *child.key.token_ids]
            index = record.history(path, child.key.extra_key)
            for i, block in enumerate(server.tree_cache.component.blocks_of(child).tolist(), start=len(tokens) // P):
                blocks[block] = index[i * P : (i + 1) * P]
            stack.append((child, path))
    if blocks:
        record.check(server.runtime.store, blocks, server.runtime.policy.keeps_all)


def check_records(server) -> None:
    """The CPU's records: owners, ref counts, windows, charges, and SGLang's leak equation."""
    runtime, tree = server.runtime, server.tree_cache
    blocks, ledger = runtime.blocks, runtime.ledger
    holding = [r for r in server.requests.values() if getattr(r, "kvc", None) is not None]
    own = [b for r in holding for b in r.kvc.blocks[r.kvc.shared :]]
    kept, idle = [], []
    for node in _nodes(tree):
        mine = tree.component.blocks_of(node).tolist()
        kept += mine
        idle += mine if node.component(FULL).lock_ref == 0 else []
    assert len({*own, *kept}) == len(own) + len(kept) == blocks.used_count, "a block has two owners, or none"
    in_tree = tree.evictable_slots() + tree.protected_size()
    assert server.token_to_kv_pool_allocator.used_slots() == in_tree + len(own) * P

    ref_count, windows = np.zeros_like(blocks.ref_count), np.zeros_like(blocks.window_count)
    for r in holding:
        ref_count[r.kvc.blocks] += 1
        windows[r.kvc.blocks[r.kvc.window_start :]] += 1
        window = max(0, r.kv.kv_committed_len - runtime.config.window) // P
        assert r.kvc.window_start <= window, "a window was left too early"
        assert (blocks.state[r.kvc.blocks[max(window, r.kvc.shared) :]] == State.OPEN).all(), "a window is packed"
    assert (ref_count == blocks.ref_count).all(), "ref counts drifted"
    assert (windows == blocks.window_count).all(), "window counts drifted"

    assert sorted(idle) == np.flatnonzero(ledger.idle).tolist(), "what is idle drifted"
    assert ledger.total == ledger.charge.sum() <= ledger.limit and ledger.idle_blocks == len(idle)
    assert ledger.idle_total == ledger.charge[idle].sum()
    assert runtime.capacity.reachable_tokens() <= runtime.sizing.capacity_tokens


def _nodes(tree):
    stack = list(tree.root_node.children.values())
    while stack:
        node = stack.pop()
        stack += node.children.values()
        yield node
