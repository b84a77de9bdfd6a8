"""Cost of collecting attention scores in prefills and decode steps."""

from __future__ import annotations

import torch

from kvc_kernels.scores.reference import DECODE_STRIDE, ScoreSampling

from .common import Workload, choose_page_bytes
from .extend_stock import DIM, GROUP, HEADS, SCALE
from .timing import timed

# Sampled queries of a prompt.
SAMPLINGS = {"window 64": ScoreSampling(64), "all": ScoreSampling(), "one in 16": ScoreSampling(stride=16)}


def collecting(tokens: int) -> list[dict]:
    """Cost of collecting attention scores in a prompt of `tokens` tokens, relative to one layer's prefill."""
    from kvc_kernels.layout import PoolLayout
    from kvc_kernels.scores.prefill_kernel import AttentionScores
    from tests.support.random_store import random_store

    from . import layer

    base = Workload("k8v4+k4v2", block_tokens=128)
    page = choose_page_bytes(base.formats, head_dim=DIM, block_tokens=128, has_scores=True)
    layout = PoolLayout(1, HEADS, DIM, 128, page, True)
    n = tokens // 128
    counts = torch.zeros((n, 1, HEADS, 2), dtype=torch.int64)
    store = random_store(layout, base.block_formats(), torch.zeros(n, dtype=torch.int64), counts, device="cuda")
    blocks = (1 + torch.randperm(n)).int().cuda()[None]
    q = torch.randn((tokens, HEADS * GROUP, DIM), device="cuda", dtype=torch.bfloat16)
    lse = torch.full((tokens, HEADS * GROUP), 20.0, device="cuda")
    rows = [dict(case="score", name="prefill of one layer", new=tokens, ms=layer.prefill_ms(tokens))]
    for name, sampling in SAMPLINGS.items():
        op = AttentionScores(store, query_heads=HEADS * GROUP, sampling=sampling)
        op.plan(blocks, [0], [tokens])
        ms = timed(lambda op=op: op.add(0, q, lse, scale=SCALE))
        rows.append(dict(case="score", name=name, new=tokens, ms=ms))
    return rows


def sampled_step(batch: int, tokens: int):
    """(store, blocks `[B, NB]`, lengths `[B]`, queries) of a decode step of `batch` requests of about `tokens` in k4v4,
    all with their own length."""
    from kvc_kernels.layout import PoolLayout
    from tests.support.random_store import random_store

    base = Workload("k4v4", block_tokens=128)
    page = choose_page_bytes(base.formats, head_dim=DIM, block_tokens=128, has_scores=True, whole=True)
    layout = PoolLayout(1, HEADS, DIM, 128, page, True)
    n = batch * (tokens // 128 + 1)
    counts = torch.zeros((n, 1, HEADS, 2), dtype=torch.int64)
    counts[..., 0] = 128
    store = random_store(layout, base.block_formats(), torch.ones(n, dtype=torch.int64), counts, device="cuda")
    rows = (1 + torch.randperm(n)).int().cuda().view(batch, -1)
    lens = (tokens - torch.arange(batch)).int().cuda()
    return store, rows, lens, torch.randn((batch, HEADS * GROUP, DIM), device="cuda", dtype=torch.bfloat16)


def collecting_steps(batch: int, tokens: int) -> list[dict]:
    """The same cost in one decode step, if all requests are sampled, or only those that `ScoreSampling` samples, here
    one in DECODE_STRIDE."""
    from kvc_kernels.decode.attention import DecodeAttention
    from kvc_kernels.scores.prefill_kernel import AttentionScores

    from . import layer

    store, rows, lens, q = sampled_step(batch, tokens)
    attend = DecodeAttention(store, max_batch=batch, max_blocks=rows.shape[1], query_heads=HEADS * GROUP)
    attend.plan(rows, lens)
    lse = torch.empty((batch, HEADS * GROUP), device="cuda")
    ms = timed(lambda: attend.run(0, q, scale=SCALE, lse=lse))
    whole = [("attention", ms), ("one layer", ms + layer.products_ms(batch))]
    out = [dict(case="score decode", name=name, prefix=tokens, new=batch, ms=ms) for name, ms in whole]
    for stride in (1, DECODE_STRIDE):
        sampling = ScoreSampling(reduce="sum", power=2, decode_stride=stride)
        op = AttentionScores(
            store, query_heads=HEADS * GROUP, sampling=sampling, max_batch=batch, max_blocks=rows.shape[1]
        )
        op.plan_decode(rows, lens)
        ms = timed(lambda op=op: op.add(0, q, lse, scale=SCALE))
        out.append(dict(case="score decode", name=f"one step in {stride}", prefix=tokens, new=batch, ms=ms))
    return out
