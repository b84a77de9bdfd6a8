"""LeanKV's plan by one kernel equals the tiers of the torch reference, token by token."""

import pytest
import torch

from kvc_kernels import ops
from kvc_kernels.common import bits
from kvc_kernels.tiering.thresholds import Thresholds, plan_thresholds
from kvc_kernels.tiering.thresholds_kernel import plan_thresholds_triton
from tests.kernels.compact.test_interpret import BLOCKS
from tests.support.pages import block_formats_of, fill, make_store, random_kv


def scored_store(spec, **options):
    """Three full blocks; scores have ties and zeros, and tokens have few or many queries."""
    store = make_store(block_formats_of(spec), head_dim=64, has_scores=True, layers=2, **options)
    fill(store, BLOCKS, *random_kv(store, 3 * store.layout.block_tokens, seed=4))
    gen = torch.Generator().manual_seed(6)
    page = store.layout.page(store.block_formats[0].high)
    scores = bits.segment(page, store.pages, "scores", torch.float32)
    scores.exponential_(generator=gen).mul_(2)
    scores.masked_fill_(torch.rand(scores.shape, generator=gen) < 0.2, 0.0)
    scores.copy_(torch.where(torch.rand(scores.shape, generator=gen) < 0.3, 0.25, scores))
    store.query_counts[BLOCKS] = torch.tensor([0, 37, 500], dtype=torch.int32)
    return store


def both(store, lengths, alpha, sampling, from_format):
    """Blocks of a prompt that ends in the second one."""
    p = store.layout.block_tokens
    prompts = torch.full_like(BLOCKS, int(BLOCKS[1]) * p + 21)
    args = (store, BLOCKS, BLOCKS * p, torch.tensor(lengths), prompts, alpha, sampling)
    plans = [
        f(*args, from_format=from_format, to=store.block_formats[-1]) for f in (plan_thresholds, plan_thresholds_triton)
    ]
    assert plans[0].dtype == plans[1].dtype
    assert torch.equal(*plans)
    return plans[0]


CASES = [
    # thresholds, sampling, tokens per block
    (Thresholds(1.0, 0.02), ops.ScoreSampling(), 32),
    (Thresholds(3.0, 0.9), ops.ScoreSampling(stride=16), 48),
    (Thresholds(3.0, 0.9), ops.ScoreSampling(window=32), 64),
    (Thresholds(3.0, 0.9), ops.ScoreSampling(window=16, stride=4, decode_stride=2, skip=3), 48),
    (Thresholds(0.0, 0.0), ops.ScoreSampling(), 32),
    (Thresholds(0.0, 0.9), ops.ScoreSampling(), 32),
]


@pytest.mark.parametrize("alpha, sampling, block_tokens", CASES)
def test_tiers_match_reference_on_first_and_second_plan(alpha, sampling, block_tokens):
    store = scored_store("k8v4+k4v2", block_tokens=block_tokens)
    first = both(store, [0, 0, 300], alpha, sampling, 0)
    ops.compact(store, BLOCKS, 1, first, from_format=0)
    store.query_counts[BLOCKS] += 400
    again = both(store, [900, 700, 0], alpha, sampling, 1)
    assert (again <= first).all()
    if 0 < alpha.low:
        assert (again < first).any()


def test_head_never_gets_more_pages_than_it_has():
    """Pages of the low format hold fewer tokens than those of the high one."""
    store = scored_store("k2v2+k8v8", block_tokens=64)
    block_formats = store.block_formats[1]
    assert store.layout.page(block_formats.low).tokens < store.layout.page(block_formats.high).tokens
    before = ops.keep_all(3, store.layout)
    before[1, :, :, 1::2] = 0
    before[2, :, :, 5:] = 1
    ops.compact(store, BLOCKS, 1, before, from_format=0)
    store.query_counts[BLOCKS] += 100
    for low in (0.01, 0.3, 1.0):
        both(store, [400, 400, 400], Thresholds(2.0, low), ops.ScoreSampling(), 1)


def test_no_blocks():
    store = scored_store("k8v4+k4v2")
    none = BLOCKS[:0]
    plan = plan_thresholds_triton(
        store, none, none, none, none, Thresholds(1.0, 0.1), ops.ScoreSampling(), from_format=0,
        to=store.block_formats[1],
    )
    assert plan.shape == (0, 2, 2, 32)
