"""Counts and charges compared with what the store holds, recounted independently."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from kvc_kernels import ops
from kvc_kernels.formats import FORMATS
from kvc_kernels.layout import PoolLayout
from sglang_kvc.cache.blocks import State
from sglang_kvc.policies.published.leankv import LeanKV
from sglang_kvc.stats.collect import measure

from . import record
from .model import P, ToyServer, make_runtime, pages_held


def bytes_in_store(runtime, blocks: np.ndarray) -> int:
    """Bytes of the pages of `blocks`, of those pages' ring entries, and of every row of a block id."""
    store = runtime.store
    page = store.pages[0].nbytes + store.ring[0].nbytes
    rows = [x for x in (store.table, store.counts, store.headers, store.format_id, store.query_counts) if len(x)]
    assert all(len(x) == runtime.sizing.num_blocks for x in rows)
    return int(pages_held(store)[blocks].sum()) * page + len(blocks) * sum(x[0].nbytes for x in rows)


@pytest.mark.parametrize(
    "options",
    [{"high": "bf16"}, {"high": "k4v4"}, {"policy": "quota", "keep": 0.5}, {"high": "k8v8"}],
    ids=lambda options: "-".join(str(x) for x in options.values()),
)
def test_bytes_include_pages_tables_headers_and_ring(options):
    server = ToyServer(**options)
    for tail in (1, 2):
        server.admit([*range(2 * P), *[tail] * 40])
    server.runtime.flush()
    stats, state = measure(server.runtime, detail=False), server.runtime.blocks.state
    assert stats.bytes == bytes_in_store(server.runtime, np.flatnonzero(state != State.FREE))
    assert stats.packed_bytes == bytes_in_store(server.runtime, np.flatnonzero(state == State.PACKED))


@pytest.mark.parametrize("low", [None, "k4v2"])
def test_full_pool_is_packed_in_waves_within_reserve(low):
    """All blocks are queued at once when only the reserve is free: no page may be handed out twice."""
    tiers = {"policy": "leankv", "high": "k8v4", "low": low} if low else {"high": "k4v4"}
    runtime = make_runtime(blocks=20, window=0, **tiers)
    blocks = runtime.take([P * i for i in range(runtime.capacity.available_tokens() // P)])
    runtime.flush()
    head, tail = runtime.store.cursor.tolist()
    assert len(blocks) * runtime.store.block_formats[1].pages > tail - head, "one wave would fit"
    numbers = record.history(list(range(P * len(blocks))), None)
    slots = torch.tensor(blocks).repeat_interleave(P) * P + torch.arange(P).repeat(len(blocks))
    record.write_rows(runtime.store, slots, numbers)
    assert runtime.queue_due(blocks) == len(blocks)
    runtime.flush()
    ops.check_invariants(runtime.store)
    record.check(runtime.store, {b: numbers[P * i : P * (i + 1)] for i, b in enumerate(blocks)}, keeps_all=low is None)


def test_block_ids_limit_pool_of_small_blocks():
    """LeanKV may prune a block to nothing. Then ids run out long before pages."""
    runtime = make_runtime(blocks=4, policy="leankv", high="k8v4", low="k4v2", alpha_high=9, alpha_low=9, window=0)
    taken = []
    while ids := runtime.take([0]):
        taken += ids
        assert len(taken) < runtime.sizing.num_blocks
        runtime.step += 1
        runtime.flush()
        runtime.store.query_counts[ids] = 1
        runtime.queue_due(ids)
        runtime.settle()
    assert len(taken) == runtime.sizing.num_blocks - 1
    assert runtime.ledger.free > 4 * runtime.layout.block_pages_bf16, "pages ran out"
    assert runtime.capacity.available_tokens() == runtime.capacity.reachable_tokens() == 0
    runtime.ledger.set_idle(np.array(taken[:1]), True)
    assert runtime.capacity.reachable_tokens() == P and runtime.capacity.available_tokens() == 0


@pytest.mark.parametrize(("high", "low"), [("k8v4", "k4v2"), ("k4v4", "k2v2")])
@pytest.mark.parametrize("page_bytes", [1152, 1680, 2304])
def test_leankv_charge_covers_worst_tier_split(high, low, page_bytes):
    layout = PoolLayout(2, 3, 32, P, page_bytes, has_scores=True)
    tokens = [layout.page(FORMATS[f]).tokens for f in (high, low)]
    splits = [-(-n // tokens[0]) + -(-(P - n) // tokens[1]) for n in range(P + 1)]
    charged = LeanKV(high=high, low=low).block_formats(layout)[1].pages
    assert charged >= 2 * 3 * min(max(splits), layout.head_pages_bf16)


def test_most_recently_used_prefix_is_evicted_last():
    server = ToyServer(high="bf16", blocks=6)
    prompts = [[1000 * n + i for i in range(P)] + [n] for n in range(3)]
    blocks = []
    for prompt in prompts:
        req = server.admit(prompt)
        blocks.append(req.kvc.blocks[0])
        server.finish(req)
    server.finish(server.admit(prompts[0]))  # the request hits the cached prompt
    order = []
    while server.runtime.ledger.idle_blocks:
        server.tree.evict(EvictParams(num_tokens=P))
        order += [b for b in blocks if server.runtime.blocks.state[b] == State.FREE and b not in order]
    assert order == [blocks[1], blocks[2], blocks[0]]
