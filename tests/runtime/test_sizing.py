"""Sizes of the pool: block ids where the budget of a prompt or the data decide the size of a block."""

from __future__ import annotations

import pytest

from sglang_kvc.cache.one_shot import Budget
from sglang_kvc.cache.sizing import make_layout, size_server
from sglang_kvc.options.config import KvcConfig
from sglang_kvc.policies import make_policy

P = 128
TOKEN_BYTES = 4 * 32 * 8 * 128  # K and V of a token in bf16: 32 layers, 8 heads, head_dim 128


def sized(default: Budget | None):
    """Sizes, layout and packed format of a k4v4 server with memory for a million tokens in bf16."""
    config = KvcConfig(block_size=P, window=0, high="k4v4", one_shot=default)
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


def test_block_ids_of_one_shot_prompts_take_4_percent_of_the_memory():
    plain, *_ = sized(None)
    for ratio in (8, 64):
        with_ids, *_ = sized(Budget(ratio=ratio))
        assert 0.95 < with_ids.capacity_tokens / plain.capacity_tokens < 0.97


@pytest.mark.parametrize(("alpha_low", "smallest"), [(0.02, 3.08), (0.1, 4.08), (1.0, 7.96), (4.0, 8.0)])
def test_block_ids_of_leankv_suffice_for_measured_blocks(alpha_low, smallest):
    """`smallest`: largest measured compression of packed blocks at this threshold, by the last 64 queries."""
    config = KvcConfig(policy="leankv", block_size=P, window=0, high="k8v4", low="k4v2", alpha_low=alpha_low, lag=512)
    policy = make_policy(config)
    layout = make_layout(config, policy, layers=32, heads=8, head_dim=128)
    sizing = size_server(1_000_000 * TOKEN_BYTES, config, policy, layout, policy.block_formats(layout), 2)
    assert sizing.num_blocks >= smallest * sizing.num_pages / layout.block_pages_bf16
    assert sizing.num_blocks <= max(3.9, 1.1 * smallest) * sizing.num_pages / layout.block_pages_bf16
