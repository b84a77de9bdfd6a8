"""LeanKV's rule from its paper (arXiv 2412.03131, section 4, Algorithm 1), token by token, against the plan of blocks.

The paper's rule gives each token's tier. Filling the last page of a tier may raise tokens above it, by less than a page
per tier; no token falls below it.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvc_kernels import ops
from kvc_kernels.common.bits import segment
from kvc_kernels.formats import BF16, FORMATS
from kvc_kernels.layout import BlockFormat
from tests.support.pages import fill, make_store, random_kv

HIGH, LOW = FORMATS["k8v4"], FORMATS["k4v2"]
BLOCKS = [3, 1, 4]
STARTS = [0, 32, 320]
BEHIND = [50, 20, 7]  # queries that follow each block


def deserved(mean_attention: float, position: int, length: int, alpha: ops.Thresholds) -> int:
    """During the prompt a token at position i competes with the i tokens up to it, later with all N.

    What is not pruned is high or low, so with alpha_high 0 it is high.
    """
    competitors = length if length > 0 else position + 1
    if mean_attention < alpha.low / competitors:
        return 0
    return 2 if mean_attention >= alpha.high / competitors else 1


@pytest.mark.parametrize("alpha", [ops.Thresholds(1.1, 0.4), ops.Thresholds(0.0, 0.4)])
@pytest.mark.parametrize("lengths", [[0, 0, 0], [400, 400, 400], [0, 90, 1000]])
def test_plans_follow_algorithm_1(lengths, alpha):
    store = make_store(
        (BlockFormat(BF16), BlockFormat(HIGH, LOW, exact=False)), layers=2, has_scores=True, block_tokens=64, blocks=4
    )
    p = store.layout.block_tokens
    fill(store, torch.tensor(BLOCKS), *random_kv(store, len(BLOCKS) * p))
    page = store.layout.page(BF16)
    mean = np.random.default_rng(3).exponential(1, (len(BLOCKS), 2, 2, p))
    for i, (n, start) in enumerate(zip(lengths, STARTS)):
        mean[i] /= n or start + p / 2
    # A token is seen by the queries after its block and by the later ones of its block.
    queries = np.array(BEHIND)[:, None] + np.arange(p)[::-1]
    attention_scores = (mean * queries[:, None, None, :]).astype(np.float32)
    scores, at = segment(page, store.pages, "scores", torch.float32), torch.arange(p)
    for i, block in enumerate(BLOCKS):
        scores[
            store.table[block, :, :, at // page.tokens].long(), at % page.tokens
        ] = torch.from_numpy(attention_scores[i])
        store.query_counts[block] = BEHIND[i]
    got = ops.plan_thresholds(
        store, torch.tensor(BLOCKS), torch.tensor(STARTS), torch.tensor(lengths), torch.tensor([400, 400, 400]), alpha,
        ops.ScoreSampling(), from_format=0, to=store.block_formats[1],
    ).numpy()  # fmt: skip
    high, low = (store.layout.page(f).tokens for f in (HIGH, LOW))
    seen = set()
    for i, l, h in np.ndindex(got.shape[:3]):
        right = np.array([deserved(mean[i, l, h, t], STARTS[i] + t, lengths[i], alpha) for t in range(p)])
        seen |= set(right.tolist())
        assert (got[i, l, h] >= right).all()
        lifted = int((got[i, l, h] == 2).sum()) - int((right == 2).sum())
        assert 0 <= lifted < high
        assert int((got[i, l, h] > 0).sum()) - int((right > 0).sum()) < high + low
    assert seen == ({0, 1, 2} if alpha.high else {0, 2})
    if not alpha.high:
        assert (got != 1).all()
