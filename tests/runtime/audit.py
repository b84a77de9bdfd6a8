"""Invariants that hold after every forward and every turn of the scheduler, recounted from scratch."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from kvc_kernels import ops
from kvc_kernels.store import PageStore
from sglang_kvc.adapter.radix_cache import FULL
from sglang_kvc.adapter.request_limits import format_id_of
from sglang_kvc.cache.blocks import State

from . import record
from .model import P, pages_held


def check_device(runtime, reqs: Iterable = ()) -> None:
    """After a flush every page is in one place, and the ledger charges each block at least what it holds. For the
    one-shot prompts among the running `reqs` the charge equals what all their blocks hold together."""
    ops.check_invariants(runtime.store)
    pages, charge = pages_held(runtime.store), runtime.ledger.charge
    regular = np.arange(len(pages)) > 0
    for kept in filter(len, map(kept_blocks, reqs)):
        assert pages[kept].sum() == charge[kept].sum(), "a one-shot prompt holds other pages than it is charged"
        regular[kept] = False
    assert (pages <= charge)[regular].all(), "the ledger is below the device"
    exact = [i for i, block_format in enumerate(runtime.store.block_formats) if block_format.exact]
    exact_blocks = np.isin(runtime.store.format_id.numpy(), exact) & regular
    assert (pages[exact_blocks] == charge[exact_blocks]).all(), "a block format of a known size has another"
    gaps = {r.kv.req_pool_idx for r in reqs if r.kvc is not None and r.kvc.gap}
    assert runtime.page_ops.gaps.rows == gaps, "a row has the gap of another request"


def kept_blocks(req) -> list[int]:
    """The blocks that hold the kept tokens of a one-shot prompt that has been packed and has dropped tokens."""
    seq = req.kvc
    return [] if seq is None or seq.one_shot is None else seq.blocks[: seq.one_shot.first]


def check_reads(server, reqs: list) -> None:
    """Check what the requests read in this forward: their rows name their blocks, which store their tokens."""
    runtime, blocks = server.runtime, {}
    for req in reqs:
        n = req.kv.kv_committed_len
        row = server.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :n]
        block_ids, kept = req.kvc.blocks, kept_blocks(req)
        expected = (np.array(block_ids).repeat(P) * P)[:n] + np.arange(n) % P
        gap_end = len(kept) + req.kvc.gap
        backed = np.arange(n) // P < len(kept)
        backed |= np.arange(n) // P >= gap_end
        assert len(block_ids) == -(-n // P) and (row.numpy() == expected)[backed].all(), "a row and its record differ"
        listed = row[None, ::P].clone() // P
        left_out = runtime.page_ops.gaps.close_up(listed, torch.tensor([req.kv.req_pool_idx]))
        read = kept + block_ids[gap_end:]
        assert listed[0, : len(block_ids) - int(left_out)].tolist() == read, "a snapshot reads other blocks"
        format_ids = set(runtime.store.format_id[read].tolist())
        allowed = {0, format_id_of(runtime, req)}
        if req.kvc_level is None:
            allowed |= {*runtime.policy.ladder, runtime.policy.unplanned_format, runtime.policy.answer_format}
        assert format_ids <= allowed, "a block is at another level than its request"
        if kept:
            steps = 2 if req.kvc.one_shot.segment_blocks else 1
            record.check_kept(runtime.store, kept, req.history[: gap_end * P], req.kvc.one_shot.tokens, steps)
        prompt = req.full_untruncated_fill_ids
        written = n if req.kvc.decoding else n - req.kvc.probe_tokens(req.prefix_len, n, len(prompt))
        for i, block in enumerate(block_ids[gap_end : -(-written // P)], start=gap_end):
            tokens = req.history[i * P : min(written, (i + 1) * P)]
            assert blocks.setdefault(block, tokens)[: len(tokens)].tolist() == tokens[: len(blocks[block])].tolist()
            if len(tokens) > len(blocks[block]):
                blocks[block] = tokens
    record.check(runtime.store, blocks, runtime.policy.keeps_all, passed_formats(runtime.policy))


def passed_formats(policy) -> tuple[int, ...]:
    """Format ids that a block may have passed through in turn."""
    return policy.ladder or ((policy.unplanned_format, 1) if policy.unplanned_format else ())


def check_tree(server) -> None:
    """Check the whole tree while nothing is queued: each node stores the tokens of the path to it, on the device and in
    host memory."""
    runtime, component = server.runtime, server.tree_cache.component
    blocks, stored, stack = {}, {}, [(server.tree_cache.root_node, [])]
    while stack:
        node, tokens = stack.pop()
        for child in node.children.values():
            path = [*tokens, *child.key.token_ids]
            index = record.history(path, child.key.extra_key)
            data = child.component(FULL)
            for value, tokens_of in ((data.value, blocks), (data.host_value, stored)):
                for i, block in enumerate(_ids(component, value), start=len(tokens) // P):
                    tokens_of[block] = index[i * P : (i + 1) * P]
            stack.append((child, path))
    if blocks:
        record.check(runtime.store, blocks, runtime.policy.keeps_all, passed_formats(runtime.policy))
    if stored:
        store, ids = unpacked_records(runtime.host_tier, list(stored))
        record.check(store, dict(zip(ids, stored.values())), runtime.policy.keeps_all, passed_formats(runtime.policy))


def check_files(server) -> tuple[int, int]:
    """Check that no transfer is in progress. Returns the numbers of bytes written and read."""
    tree, tier = server.tree_cache, server.runtime.host_tier
    tier.disk.synchronize()
    assert not tree.fetches and not tier.disk.store.damaged
    return tier.disk.store.bytes_written, tier.disk.store.bytes_read


def _ids(component, value) -> list[int]:
    return [] if value is None else component.blocks_at(value).tolist()


def unpacked_records(tier, stored: list[int]) -> tuple[PageStore, list[int]]:
    """A separate store with the stored blocks, and their block ids in it."""
    source = tier.runtime.store
    layout, n = source.layout, len(stored)
    store = PageStore.create(
        layout, source.block_formats, num_pages=1 + n * layout.block_pages_bf16, num_blocks=1 + n, dtype=source.dtype,
        device="cpu",
    )  # fmt: skip
    for block, unit in enumerate(stored, start=1):
        units = tier.units[unit][tier.units[unit] >= 0]
        data, at = tier.memory.data[units].reshape(1, -1), torch.tensor([block])
        counts = torch.from_numpy(tier.transfers.counts(np.array([unit])))
        ops.take_stored(store, at, int(tier.format_id[unit]), counts)
        ops.read_records(store, at, data)
    return store, list(range(1, n + 1))


def check_records(server) -> None:
    """Check the CPU's records: owners, reference counts, windows, charges, and SGLang's leak equation."""
    runtime, tree = server.runtime, server.tree_cache
    blocks, ledger = runtime.blocks, runtime.ledger
    holding = [r for r in server.requests.values() if getattr(r, "kvc", None) is not None]
    private = [b for r in holding for b in r.kvc.owned()[r.kvc.shared :]]
    gaps = sum(r.kvc.missing for r in holding)
    assert gaps == runtime.gap_blocks, "gaps drifted"
    kept, idle, stored = [], [], []
    for node in _nodes(tree):
        node_blocks = _ids(tree.component, node.component(FULL).value)
        kept += node_blocks
        idle += node_blocks if node.component(FULL).lock_ref == 0 else []
        if node_blocks and node.component(FULL).lock_ref == 0 and not node.backuped:
            cold = runtime.demotion.tier_of(np.array(node_blocks)) > 0
            assert not cold or node in tree.component.demotions, "a cold node is never demoted"
        stored += _ids(tree.component, node.component(FULL).host_value)
    stored += [i for fetched in getattr(tree, "fetches", ()) for i in fetched.fetch.ids.tolist()]
    begun = [load.loading for load in getattr(tree, "loads", ()) if load.loading is not None]
    loading = [b for x in begun for b in x.blocks.tolist()]
    anchors = [load.anchor for load in getattr(tree, "loads", ())]
    assert len(set(anchors)) == len(anchors), "blocks are loaded twice"
    private += loading
    if runtime.host_tier is not None:
        _check_stored(runtime.host_tier, stored)
    assert len({*private, *kept}) == len(private) + len(kept) == blocks.used_count, "a block has two owners, or none"
    in_tree = tree.evictable_slots() + tree.protected_size()
    assert server.token_to_kv_pool_allocator.used_slots() == in_tree + (len(private) + gaps) * P

    ref_count, windows = np.zeros_like(blocks.ref_count), np.zeros_like(blocks.window_count)
    for r in holding:
        ref_count[r.kvc.owned()] += 1
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


def _check_stored(tier, stored: list[int]) -> None:
    """Check that each unit of host memory is free or belongs to one stored block, which the tree holds or a file is
    being read into."""
    assert len(set(stored)) == len(stored) == tier.stored, "a stored block has two owners, or none"
    units = tier.units[stored]
    used = units[units >= 0].tolist()
    free = list(tier.memory._free)
    assert sorted([*used, *free]) == list(range(tier.memory.num_units)), "host memory is lost, or used twice"


def _nodes(tree):
    stack = list(tree.root_node.children.values())
    while stack:
        node = stack.pop()
        stack += node.children.values()
        yield node
