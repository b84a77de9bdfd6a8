"""`compact_triton` against `compact`: equal digests, tables, rings and page counts."""

import numpy as np
import pytest
import torch

from kvc_kernels import ops
from kvc_kernels.common import bits
from kvc_kernels.compact import launch
from kvc_kernels.compact.launch import compact_triton
from kvc_kernels.layout import page_bytes_for
from tests.support.pages import block_formats_of, fill, free_pages, make_store, random_kv, random_tiers

BLOCKS = torch.tensor([5, 2, 3])


def pair(**options):
    """Two equal stores with three full blocks; scores are random where there are any."""
    stores = [make_store(**options) for _ in range(2)]
    for store in stores:
        fill(store, BLOCKS, *random_kv(store, 3 * store.layout.block_tokens, seed=4))
        if store.layout.has_scores:
            page = store.layout.page(store.block_formats[0].high)
            scores = bits.segment(page, store.pages, "scores", torch.float32)
            scores.uniform_(generator=torch.Generator().manual_seed(7))
    return stores


def same(a, b, blocks=BLOCKS):
    for block in blocks.tolist():
        assert ops.block_digest(a, block) == ops.block_digest(b, block)
    for name in ("table", "counts", "format_id", "cursor"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert torch.equal(free_pages(a), free_pages(b))


@pytest.mark.parametrize("spec", ["k8v8", "k8v4", "k4v8", "k4v4", "k4v2", "k2v2", "k8v4+k4v2"])
def test_compaction_gives_same_bytes(spec):
    a, b = pair(block_formats=block_formats_of(spec), head_dim=64, has_scores="4" in spec, layers=2)
    tiers = random_tiers(a, 3, a.block_formats[1], np.random.default_rng(2))
    expected = ops.compact(a, BLOCKS, 1, tiers, from_format=0)
    assert torch.equal(compact_triton(b, BLOCKS, 1, tiers, from_format=0), expected)
    same(a, b)
    ops.check_invariants(b)


WHOLE = [
    # Formats, tokens per block, tokens per page of the high format
    ("k4v4", 64, 64),
    ("k4v4", 128, 48),
    ("k8v4", 64, 64),
    ("k4v2", 96, 64),
    ("k2v2", 64, 32),
    ("k8v8", 96, 80),
    ("k8v4+k4v2", 64, 48),
]


@pytest.mark.parametrize("keys", ["held", "read twice"])
@pytest.mark.parametrize("spec, block_tokens, page_tokens", WHOLE)
def test_all_kept_gives_same_bytes(spec, block_tokens, page_tokens, keys, monkeypatch):
    """No tiers are given, and some blocks do not fill their pages."""
    if keys == "read twice":
        monkeypatch.setattr(launch, "WARP_ELEMENTS", 1)
    block_formats, has_scores = block_formats_of(spec), block_tokens == 64
    page = page_bytes_for(block_formats[1].high, page_tokens, head_dim=64, has_scores=has_scores)
    a, b = pair(
        block_formats=block_formats, head_dim=64, has_scores=has_scores, heads=1, block_tokens=block_tokens,
        page_bytes=page + 16 * (page_tokens == 80), dtype=torch.float16 if page_tokens == 32 else torch.bfloat16,
    )  # fmt: skip
    assert a.layout.page(block_formats[1].high).tokens == page_tokens
    expected = ops.compact(a, BLOCKS, 1, ops.keep_all(3, a.layout), from_format=0)
    assert torch.equal(compact_triton(b, BLOCKS, 1, None, from_format=0), expected)
    same(a, b)
    ops.check_invariants(b)


def test_blocks_of_equal_formats_are_compacted_together():
    """Some of the blocks already have the target format; both formats have the same pages."""
    a, b = pair(block_formats=block_formats_of("k8v4", "k8v4"), head_dim=64, has_scores=True)
    tiers = [random_tiers(a, 3, a.block_formats[1], np.random.default_rng(seed)) for seed in (5, 6)]
    for store, move in ((a, ops.compact), (b, compact_triton)):
        ops.compact(store, BLOCKS, 1, None, from_format=0)
        ops.compact(store, BLOCKS[:2], 2, tiers[0][:2], from_format=1)
        pages = move(store, BLOCKS, 2, tiers[1], from_format=1)
        assert pages.tolist() == ops.block_head_pages(store, BLOCKS).sum((1, 2)).tolist()
        ops.check_invariants(store)
    same(a, b)


def test_packed_source_without_tiers_gives_same_bytes():
    stores = [s for _ in range(2) for s in pair(block_formats=block_formats_of("k8v8", "k4v4"), head_dim=64, heads=1)]
    tiers = random_tiers(stores[0], 3, stores[0].block_formats[1], np.random.default_rng(3))
    for move, plan, store in zip(
        (ops.compact, ops.compact, compact_triton), (ops.keep_all(3, stores[0].layout), None, None), stores
    ):
        ops.compact(store, BLOCKS, 1, tiers, from_format=0)
        move(store, BLOCKS, 2, plan, from_format=1)
    same(stores[0], stores[1])
    same(stores[0], stores[2])


def hard_rows(k: torch.Tensor, v: torch.Tensor) -> None:
    """A constant channel, ranges below and beyond fp16, both ends of a range, ties between codes; in place."""
    p, d = k.shape[1], k.shape[3]
    k[..., 0], k[..., 1], k[:, 3, :, 2], k[:, 5, :, 3] = 1.5, 1e-9, 3e38, -3e38
    k[..., 4] = torch.arange(p).view(1, p, 1) * 0.5
    k[..., 5] = (torch.arange(p) % 31).view(1, p, 1) * 0.25
    v[:, 5], v[:, 6, :, :7], v[:, 7], v[:, 8, :, 3] = 0, 1e30, torch.arange(d) * 0.5, -1e30
    v[:, 9] = (torch.arange(d) % 31) * 0.125


@pytest.mark.parametrize("spec", ["k8v8", "k4v4", "k2v2"])
def test_hard_values_give_same_bytes(spec):
    a, b = pair(block_formats=block_formats_of(spec), head_dim=128, block_tokens=64, heads=1)
    k, v = random_kv(a, 64, seed=1)
    hard_rows(k, v)
    for store in (a, b):
        ops.append(store, 0, BLOCKS[:1].expand(64), torch.arange(64), k[0], v[0])
    ops.compact(a, BLOCKS, 1, None, from_format=0)
    compact_triton(b, BLOCKS, 1, None, from_format=0)
    same(a, b)


def test_hard_values_in_fp16_pages_of_48_tokens_give_same_bytes():
    a, b = pair(
        block_formats=block_formats_of("k8v4+k4v2"), head_dim=128, block_tokens=64, has_scores=True, heads=1,
        dtype=torch.bfloat16
    )
    assert a.layout.page(a.block_formats[1].low).tokens == 48
    for store in (a, b):
        k, v = random_kv(store, 64, seed=1)
        hard_rows(k, v)
        for layer in range(1):
            ops.append(store, layer, BLOCKS[:1].expand(64), torch.arange(64), k[layer], v[layer])
    tiers = random_tiers(a, 3, a.block_formats[1], np.random.default_rng(5))
    tiers[0, :, :] = 2
    tiers[0, :, :, ::3] = 1
    ops.compact(a, BLOCKS, 1, tiers, from_format=0)
    compact_triton(b, BLOCKS, 1, tiers, from_format=0)
    same(a, b)


MOVES = [
    ("k8v8", "k4v4"), ("k8v8", "k2v2"), ("k4v4", "k4v2"), ("k4v4", "k2v2"), ("k8v4+k4v2", "k8v4+k4v2"),
    ("k8v4+k4v2", "k4v2"),
]  # fmt: skip


@pytest.mark.parametrize("has_scores", [False, True])
@pytest.mark.parametrize("source, target", MOVES)
def test_packed_blocks_give_same_bytes(source, target, has_scores):
    a, b = pair(block_formats=block_formats_of(source, target), head_dim=64, has_scores=has_scores, heads=1, layers=2)
    gen = np.random.default_rng(9)
    tiers = random_tiers(a, 3, a.block_formats[1], gen)
    for store in (a, b):
        ops.compact(store, BLOCKS, 1, tiers, from_format=0)
    ceiling = ops.block_tiers(a, BLOCKS, 1)
    target_tiers = random_tiers(a, 3, a.block_formats[2], gen, ceiling=ceiling)
    expected = ops.compact(a, BLOCKS, 2, target_tiers, from_format=1)
    assert torch.equal(compact_triton(b, BLOCKS, 2, target_tiers, from_format=1), expected)
    same(a, b)
    ops.check_invariants(b)


STEPS = [("k8v8", "k8v4"), ("k8v8", "k4v8"), ("k8v4", "k4v4"), ("k4v8", "k4v4"), ("k4v4", "k4v2"), ("k4v2", "k2v2")]


@pytest.mark.parametrize("page_bytes", [3264, 2688])
@pytest.mark.parametrize("source, target", [*STEPS, ("k8v4", "k2v2")])
def test_ladder_steps_give_same_bytes(source, target, page_bytes):
    """Whole blocks with hard values, in pages that both formats fill only partly."""
    a, b = pair(block_formats=block_formats_of(source, target), head_dim=64, block_tokens=64, heads=1,
                page_bytes=page_bytes)  # fmt: skip
    k, v = random_kv(a, 64, seed=1)
    hard_rows(k, v)
    for store in (a, b):
        ops.append(store, 0, BLOCKS[:1].expand(64), torch.arange(64), k[0], v[0])
        ops.compact(store, BLOCKS, 1, None, from_format=0)
    expected = ops.compact(a, BLOCKS, 2, None, from_format=1)
    assert torch.equal(compact_triton(b, BLOCKS, 2, None, from_format=1), expected)
    same(a, b)
    ops.check_invariants(b)


def test_empty_call_and_unknown_format():
    store, _ = pair(block_formats=block_formats_of("k8v8", "k4v4"), head_dim=64)
    tiers = ops.keep_all(3, store.layout)
    assert compact_triton(store, BLOCKS[:0], 1, tiers[:0], from_format=0).numel() == 0
    with pytest.raises(ValueError):
        compact_triton(store, BLOCKS, 0, tiers, from_format=1)
