"""Sizes of the pool: block ids where the budget of a prompt or the data decide the size of a block."""

from __future__ import annotations

import pytest

from kvc_kernels.layout import RING_ENTRY_BYTES
from sglang_kvc.cache.one_shot import Budget
from sglang_kvc.cache.sizing import INEXACT_BLOCK_RATIO, make_layout, size_server
from sglang_kvc.options.config import KvcConfig
from sglang_kvc.policies import make_policy

P = 128
TOKEN_BYTES = 4 * 32 * 8 * 128  # K and V of a token in bf16: 32 layers, 8 heads, head_dim 128


def sized(default: Budget | None, high: str = "k4v4", **options):
    """Sizes, layout and packed format of a server with memory for a million tokens in bf16."""
    config = KvcConfig(block_size=P, window=0, high=high, one_shot=default, **options)
    policy = make_policy(config)
    layout = make_layout(config, policy, layers=32, heads=8, head_dim=128)
    block_formats = policy.block_formats(layout)
    return size_server(1_000_000 * TOKEN_BYTES, config, policy, layout, block_formats, 2), layout, block_formats[1].high


@pytest.mark.parametrize("blocks", [32, 1000])
@pytest.mark.parametrize("budget", [Budget(ratio=6), Budget(ratio=7.5)])
def test_block_ids_suffice_for_prompts_that_fill_the_pages(budget, blocks):
    """Each prompt of `blocks` blocks keeps a block id for every block that some head fills."""
    fits = {}
    for default in (None, budget):
        sizing, layout, fmt = sized(default)
        plan = budget.plan(layout, fmt, blocks, blocks * P)
        fits[default] = sizing.num_blocks // plan.kept_blocks, sizing.chargeable_pages // plan.pages
    (ids, pages), (plain_ids, plain_pages) = fits[budget], fits[None]
    assert ids >= pages > plain_ids
    assert plain_pages > pages  # tables of the additional ids take memory


@pytest.mark.parametrize(("high", "share"), [("k8v8", 0.045), ("k8v4", 0.034), ("k4v4", 0.031)])
def test_memory_of_block_ids_for_one_shot_prompts(high, share):
    plain, *_ = sized(None, high)
    for ratio in (8, 64):
        with_ids, *_ = sized(Budget(ratio=ratio), high)
        assert 1 - with_ids.capacity_tokens / plain.capacity_tokens == pytest.approx(share, abs=0.001)


@pytest.mark.parametrize(("alpha_low", "compression"), [(0.02, 3.08), (0.1, 4.08)])
def test_block_ids_of_leankv_suffice_for_measured_blocks(alpha_low, compression):
    """`compression`: largest measured compression of packed blocks at this threshold, with all metadata, by the last 64
    queries."""
    sizing, layout, _ = sized(None, "k8v4", policy="leankv", low="k4v2", alpha_low=alpha_low, lag=512)
    block_bytes = P * TOKEN_BYTES / compression
    pages = (block_bytes - layout.block_meta_bytes) / (layout.page_bytes + RING_ENTRY_BYTES)
    ids = sizing.num_pages / pages
    assert ids <= sizing.num_blocks <= 1.15 * ids


def test_block_ids_of_leankv_are_bounded():
    most, layout, _ = sized(None, "k8v4", policy="leankv", low="k4v2", alpha_low=4.0)
    assert most.num_blocks <= INEXACT_BLOCK_RATIO * most.num_pages / layout.block_pages_bf16 + 2
