"""Prefill libraries over dense rows against float64: outputs, log-sum-exps, windows, logit caps."""

import math

import pytest
import torch

from tests.support.libraries import skip_without

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HEADS, GROUP, P = 4, 4, 128
TOLERANCE = 0.02
libraries = pytest.mark.parametrize("library", ["fa3", "flashinfer"])


def ragged(library, dim=128, dtype=torch.bfloat16):
    from kvc_kernels.extend.dense_prefill import ragged_prefill

    skip_without(library)
    prefill = ragged_prefill(
        torch.device("cuda"), library, query_heads=HEADS * GROUP, heads=HEADS, head_dim=dim, dtype=dtype
    )
    assert prefill is not None
    return prefill


def attend(q, k, v, scale, cap=0.0, window=-1, causal=True):
    """float64 output `[n, Hq, D]` and base-2 log-sum-exp `[n, Hq]` of the last n tokens of k, v `[T, H, D]`."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(GROUP, 1) for x in (k, v))
    logits = torch.einsum("nhd,thd->hnt", q, k) * scale
    if cap:
        logits = cap * torch.tanh(logits / cap)
    at, key = torch.arange(len(q), device=q.device)[:, None] + len(k) - len(q), torch.arange(len(k), device=q.device)
    if causal:
        logits = logits.masked_fill(key > at, -torch.inf)
    if window >= 0:
        logits = logits.masked_fill(key < at - window, -torch.inf)
    return torch.einsum("hnt,thd->nhd", logits.softmax(-1), v), logits.logsumexp(-1).T / math.log(2)


def close(got, want):
    out, lse = got
    worst = (out.double() - want[0]).norm(dim=-1).max() / want[0].norm(dim=-1).mean()
    assert worst < TOLERANCE and (lse - want[1]).abs().max() < 0.02


@libraries
@pytest.mark.parametrize("dim, dtype, cap", [(128, torch.bfloat16, 0.0), (64, torch.float16, 5.0)])
def test_ragged(library, dim, dtype, cap):
    op, lens = ragged(library, dim, dtype), [300, 1, 77]
    gen = torch.Generator(device="cuda").manual_seed(1)
    qkv = torch.randn((sum(lens), HEADS * (GROUP + 2), dim), generator=gen, device="cuda").to(dtype)
    q, k, v = qkv.split((HEADS * GROUP, HEADS, HEADS), 1)
    op.plan(lens)
    got = op.run(q, k, v, scale=0.1, logit_cap=cap, lse=True)
    into = torch.full_like(got[0], torch.nan), torch.full_like(got[1], torch.nan)
    op.run(q, k, v, scale=0.1, logit_cap=cap, lse=True, into=into)
    assert torch.equal(into[0], got[0]) and torch.equal(into[1], got[1])
    parts = [attend(*x, 0.1, cap) for x in zip(*(y.split(lens) for y in (q, k, v)))]
    close(got, [torch.cat(x) for x in zip(*parts)])


@libraries
@pytest.mark.parametrize("window, causal, cap", [(-1, True, 0.0), (150, True, 0.0), (-1, False, 0.0), (-1, True, 5.0)])
def test_paged(library, window, causal, cap):
    """Runs whose lists share slots, in any order, with part-filled last blocks."""
    op = ragged(library).paged(torch.device("cuda"), P, causal=causal, window=window)
    tokens, slots, last = [100, 128, 3], [[5], [2, 0, 5], [4, 2, 0, 1]], [100, 128, 9]
    gen = torch.Generator(device="cuda").manual_seed(2)
    k, v = torch.randn((2, 6, P, HEADS, 128), generator=gen, device="cuda").bfloat16()
    q = torch.randn((sum(tokens), HEADS * GROUP, 128), generator=gen, device="cuda").bfloat16()
    into = torch.full_like(q, torch.nan), q.new_full(q.shape[:2], torch.nan, dtype=torch.float32)
    for _ in range(2):  # a plan is used for many layers
        if _ == 0:
            op.plan(tokens, slots, last)
        op.run(q, k, v, into, scale=0.1, logit_cap=cap)
    parts = []
    for x, run_slots, n in zip(q.split(tokens), slots, last):
        rows = [torch.cat([y[s] for s in run_slots])[: (len(run_slots) - 1) * P + n] for y in (k, v)]
        parts.append(attend(x, *rows, 0.1, cap, window, causal))
    close(into, [torch.cat(x) for x in zip(*parts)])
    without = torch.full_like(q, torch.nan)
    op.run(q, k, v, (without, None), scale=0.1, logit_cap=cap)
    assert torch.equal(without, into[0])
