"""Column sums of the kernel against the scores that the torch reference collects."""

import copy

import numpy as np
import pytest
import torch

from kvc_kernels import ops
from kvc_kernels.ops.score_columns_triton import ReceivedAttention

from ..ops.support import fill, make_store, random_kv, random_tiers, rungs

PREFIX, NEW = [100, 0], [17, 40]
ROWS = torch.tensor([[3, 1, 4, 6], [2, 5, 0, 0]], dtype=torch.int32)


def lse_of(store, layer, q, scale, cap):
    """Base-2 log-sum-exp `[N, Hq]` in float64 of each new token over what its request stores up to itself."""
    out, at, p = torch.empty(q.shape[:2], dtype=torch.float64), 0, store.layout.block_tokens
    group = q.shape[1] // store.layout.heads
    for r, (prefix, new) in enumerate(zip(PREFIX, NEW)):
        total = prefix + new
        k, _, tier = ops.load_dense(store, layer, ROWS[r, : -(-total // p)].long())
        k = k.transpose(0, 1).flatten(1, 2)[:, :total].double()
        held = tier.transpose(0, 1).flatten(1)[:, :total] > 0
        logits = torch.einsum("nhgd,hsd->nhgs", q[at : at + new].double().unflatten(1, (-1, group)), k) * scale
        if cap:
            logits = cap * torch.tanh(logits / cap)
        seen = held[None] & (torch.arange(total) <= prefix + torch.arange(new)[:, None])[:, None]
        out[at : at + new] = logits.masked_fill(~seen[:, :, None], -torch.inf).logsumexp(-1).flatten(1)
        at += new
    return (out / np.log(2)).float()


@pytest.mark.parametrize(
    "ladder, group, key_mode, window, cap",
    [
        ("k4v4", 2, "channel", None, 0.0),
        ("k8v4+k4v2", 3, "token", 8, 0.0),
        ("k8v4+k4v2", 1, "channel", 8, 3.0),
        ("k2v2", 1, "token", None, 0.0),
    ],
)
def test_scores(ladder, group, key_mode, window, cap):
    store = make_store(ladder=rungs(ladder), head_dim=64, key_mode=key_mode, scored=True, layers=2, blocks=10)
    store.pages.zero_()  # the reference reads beyond what was written, where bytes may spell NaN
    for r in range(2):
        total = PREFIX[r] + NEW[r]
        fill(store, ROWS[r, : -(-total // 32)].long(), *random_kv(store, total, seed=r))
    full = torch.tensor([3, 4])
    tiers = random_tiers(store, 2, store.ladder[1], np.random.default_rng(1))
    ops.compact(store, full, 1, tiers, from_rung=0)
    q = torch.randn(sum(NEW), 2 * group, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    observe, scale = ops.Observe(window), 0.05
    mine = copy.copy(store)
    mine.pages = store.pages.clone()
    lse = lse_of(store, 1, q, scale, cap)
    ops.extend_attention(store, 1, q, ROWS, PREFIX, NEW, scale=scale, logit_cap=cap, observe=observe)
    op = ReceivedAttention(mine, query_heads=2 * group, observe=observe, tile=32, queries=16)
    op.plan(ROWS, PREFIX, NEW)
    op.add(1, q, lse, scale=scale, logit_cap=cap)
    blocks = ROWS.flatten().unique()[1:].long()
    a, b = (ops.block_scores(s, blocks) for s in (store, mine))
    assert a[:, 1].max() > 0.1
    assert a[:, 0].max() == b[:, 0].max() == 0
    assert torch.allclose(a, b, atol=2e-3 * float(a.max()), rtol=0.02)
