"""Compaction: determinism, moves between formats, sizes, and no host synchronization."""

import sys

import numpy as np
import pytest
import torch

from kvc_kernels import ops
from kvc_kernels.formats import FORMATS
from kvc_kernels.layout import BlockFormat
from tests.support.no_sync import NoSync
from tests.support.pages import block_formats_of, fill, make_store, random_kv, random_tiers

MIXED = block_formats_of("k8v4+k4v2", "k4v4", "k2v2")


def packed_store(block_formats, tiers_of_format, order, *, churn=0, **kw):
    """Blocks 1..3 with fixed contents, taken and compacted in `order`, after some churn of the ring."""
    store = make_store(block_formats, blocks=8, layers=2, **kw)
    for i in range(churn):
        b = torch.tensor([7, 8][: 1 + i % 2])
        ops.take_bf16(store, b)
        ops.release(store, b.flip(0))
    for b in order:
        k, v = random_kv(store, 32, seed=b)
        fill(store, torch.tensor([b]), k, v)
    return store


@pytest.mark.parametrize("has_scores", [False, True])
def test_digest_ignores_page_ids_neighbors_and_order(has_scores):
    shape = (1, 2, 2, 32)
    gen = np.random.default_rng(5)
    tiers = {b: torch.from_numpy(gen.integers(0, 3, shape)).to(torch.int8) for b in (1, 2, 3)}
    then = {
        b: torch.minimum(t, torch.from_numpy(gen.integers(0, 2, shape) * 2).to(torch.int8)) for b, t in tiers.items()
    }
    seen = []
    for churn, batches in ((0, [[1, 2, 3]]), (1, [[3, 1], [2]]), (5, [[2], [3], [1]]), (2, [[3, 2, 1]])):
        order = [b for batch in batches for b in batch]
        store = packed_store(MIXED, tiers, order, churn=churn, has_scores=has_scores)
        digests = []
        for plan, source, to in ((tiers, 0, 1), (then, 1, 2)):
            for batch in batches:
                stacked = torch.cat([plan[b] for b in batch])
                ops.compact(store, torch.tensor(batch), to, stacked, from_format=source)
            digests.append([ops.block_digest(store, b) for b in (1, 2, 3)])
        ops.check_invariants(store)
        seen.append((digests, ops.load_dense(store, 1, torch.tensor([1, 2, 3]))))
    for digests, dense in seen[1:]:
        assert digests == seen[0][0]
        assert all(torch.equal(a, b) for a, b in zip(dense, seen[0][1]))
    assert len({d for row in seen[0][0] for d in row}) == 6


def test_digest_covers_every_part_of_block():
    store = packed_store(MIXED, None, [1], has_scores=True)
    block = torch.tensor([1])
    open_digest = ops.block_digest(store, 1)
    ops.compact(store, block, 1, ops.keep_all(1, store.layout), from_format=0)
    digests = {open_digest, ops.block_digest(store, 1)}
    for change in (store.headers[1, 1, 0, 0], store.pages[int(store.table[1, 1, 1, 0])][:2], store.counts[1, 0, 0]):
        change += 1
        digests.add(ops.block_digest(store, 1))
    assert len(digests) == 5
    without = ops.block_digest(store, 1, scores=False)
    page = store.layout.page(FORMATS["k8v4"])
    store.pages[int(store.table[1, 0, 0, 0]), page.offset("scores")] += 1
    assert ops.block_digest(store, 1) not in digests
    assert ops.block_digest(store, 1, scores=False) == without
    with pytest.raises(ValueError, match="free"):
        ops.block_digest(store, 5)


def test_chunk_sizes_do_not_change_packed_bytes(monkeypatch):
    digests = []
    for limit in (1, 1 << 30):
        monkeypatch.setitem(sys.modules[ops.compact.__module__].TEMP_BYTES, "cpu", limit)
        store = packed_store(MIXED, None, [1, 2, 3], has_scores=True)
        tiers = random_tiers(store, 3, MIXED[1], np.random.default_rng(1))
        ops.compact(store, torch.tensor([1, 2, 3]), 1, tiers, from_format=0)
        digests.append([ops.block_digest(store, b) for b in (1, 2, 3)])
    assert digests[0] == digests[1]


@pytest.mark.parametrize("has_scores", [False, True])
def test_move_that_lowers_only_values_keeps_keys(has_scores):
    """k8v4 -> k4v4: values verbatim, keys mapped code to code; k4v4 with fewer tokens: both verbatim."""
    store = packed_store(block_formats_of("k8v4", "k4v4", "k4v4"), None, [1], has_scores=has_scores)
    block = torch.tensor([1])
    keep = ops.keep_all(1, store.layout)
    ops.compact(store, block, 1, keep, from_format=0)
    header = store.headers[1].clone()
    k8, v8, _ = ops.load_dense(store, 0, block)
    ops.compact(store, block, 2, keep, from_format=1)
    k4, v4, _ = ops.load_dense(store, 0, block)
    assert torch.equal(v4, v8) and torch.equal(store.headers[1], header)
    step = (header[0, :, 0].float() * 17).unsqueeze(1)
    assert ((k4[0] - k8[0]).abs() <= step / 2 * 1.001).all()
    fewer = keep.clone()
    fewer[..., ::3] = 0
    pages = ops.compact(store, block, 3, fewer, from_format=2)
    k, v, tier = ops.load_dense(store, 0, block)
    kept = fewer[0, 0] == 2
    if has_scores:
        assert torch.equal(tier[0], fewer[0, 0])
        assert torch.equal(k[0][kept], k4[0][kept]) and torch.equal(v[0][kept], v4[0][kept])
        assert torch.equal(ops.block_tiers(store, block), fewer)
    else:  # in stored order, with nothing after them
        n = int(kept[0].sum())
        assert torch.equal(k[0, :, :n], k4[0][kept].view(2, n, -1)) and not tier[0, :, n:].any()
    assert int(pages) == int(ops.block_head_pages(store, block).sum())


def test_pruned_tokens_do_not_come_back():
    store = packed_store(MIXED, None, [1], has_scores=True)
    block = torch.tensor([1])
    first = ops.keep_all(1, store.layout)
    first[..., 5:20] = 0
    ops.compact(store, block, 1, first, from_format=0)
    ops.compact(store, block, 1, ops.keep_all(1, store.layout), from_format=1)
    assert torch.equal(ops.block_tiers(store, block), first)


def test_scores_travel_with_their_tokens():
    store = packed_store(MIXED, None, [1, 2], has_scores=True)
    blocks = torch.tensor([2, 1])
    store.pages.view(torch.float32)[1:, -1] = 0
    page = store.layout.page(store.block_formats[0].high)
    words = store.pages.view(torch.float32)[:, page.offset("scores") // 4 :][:, : page.tokens]
    words.copy_(torch.rand_like(words))
    before = ops.block_scores(store, blocks)
    gen = np.random.default_rng(2)
    tiers = random_tiers(store, 2, MIXED[1], gen)
    ops.compact(store, blocks, 1, tiers, from_format=0)
    assert torch.equal(ops.block_scores(store, blocks), before * (tiers > 0))
    assert torch.equal(ops.block_scores(store, blocks, format_id=1), before * (tiers > 0))
    lower = (random_tiers(store, 2, MIXED[2], gen) > 0) & (tiers > 0)
    ops.compact(store, blocks, 2, lower.to(torch.int8) * 2, from_format=1)
    assert torch.equal(ops.block_scores(store, blocks), before * lower)
    assert torch.equal(ops.block_tiers(store, blocks, format_id=2), lower.to(torch.int8) * 2)


def test_low_tier_without_a_low_format_is_dropped():
    store = packed_store(block_formats_of("k4v4"), None, [1], has_scores=True)
    tiers = torch.randint(0, 3, (1, 2, 2, 32)).to(torch.int8)
    ops.compact(store, torch.tensor([1]), 1, tiers, from_format=0)
    assert torch.equal(ops.block_tiers(store, torch.tensor([1])), torch.where(tiers == 2, 2, 0).to(torch.int8))


def test_empty_call_is_noop_and_bad_formats_are_rejected():
    store = packed_store(block_formats_of("k4v4"), None, [1])
    assert ops.compact(
        store, torch.tensor([], dtype=torch.long), 1, ops.keep_all(0, store.layout), from_format=0
    ).shape == (0,)
    ops.release(store, torch.tensor([], dtype=torch.long))
    ops.take_bf16(store, torch.tensor([], dtype=torch.int32))
    ops.check_invariants(store)
    with pytest.raises(ValueError, match="not packed"):
        ops.compact(store, torch.tensor([1]), 0, ops.keep_all(1, store.layout), from_format=0)
    # 640-byte pages: 4 tokens of bf16, 16 of k4v4 and k8v2-like tiers fit, but two ragged tiers may need too many.
    tight = make_store(
        (*block_formats_of(), BlockFormat(FORMATS["k8v8"], FORMATS["k8v4"])), head_dim=32, page_bytes=2048,
        block_tokens=16
    )
    with pytest.raises(ValueError, match="page size"):
        ops.compact(tight, torch.tensor([1]), 1, ops.keep_all(1, tight.layout), from_format=0)


@pytest.mark.parametrize("has_scores", [False, True])
def test_step_operations_do_not_sync_host(has_scores):
    store = make_store(MIXED, layers=2, has_scores=has_scores)
    blocks, at = torch.tensor([1, 3]), torch.arange(32)
    k, v = random_kv(store, 32)
    with NoSync():
        ops.take_bf16(store, blocks)
        for b in (0, 1):
            ops.append(store, 0, blocks[b].expand(32), at, k[0], v[0])
        mean_attention_scores = torch.rand(2, 2, 2, 32)
        divisor = torch.ones(2, 32)
        tokens = (store.layout.page(FORMATS["k8v4"]).tokens, store.layout.page(FORMATS["k4v2"]).tokens)
        if has_scores:
            ops.count_queries(store, blocks.view(1, 2), torch.tensor([64]), torch.tensor([64]), ops.ScoreSampling())
            places = torch.tensor([0, 32]), torch.tensor([64, 64])
            ops.mean_attention_scores(store, blocks, *places, ops.ScoreSampling(), format_id=0)
        pages = ops.block_head_pages(store, blocks)
        tiers = ops.threshold(
            mean_attention_scores, divisor, 0.7, 0.3, ops.block_tiers(store, blocks, format_id=0), *tokens, pages
        )
        ops.compact(store, blocks, 1, tiers, from_format=0)
        lower = ops.quota(mean_attention_scores, 4, 32)
        ops.compact(store, blocks, 2, torch.minimum(lower, ops.block_tiers(store, blocks, format_id=1)), from_format=1)
        ops.release(store, blocks)
    ops.check_invariants(store)
    with pytest.raises(AssertionError), NoSync():
        torch.ones(1).item()
    with pytest.raises(AssertionError), NoSync():
        at[at > 3]
