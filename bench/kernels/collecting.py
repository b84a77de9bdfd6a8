"""Cost of collecting attention scores in prefills and decode steps."""

from __future__ import annotations

import torch

from kvc_kernels.scores.reference import DECODE_STRIDE, ScoreSampling

from .common import Workload, choose_page_bytes
from .extend_stock import DIM, GROUP, HEADS, SCALE
from .timing import timed

SAMPLINGS = {"window 64": ScoreSampling(64), "all": ScoreSampling(), "one in 16": ScoreSampling(stride=16)}


def prefill_rows(tokens: int) -> list[dict]:
    """Times of one layer's prefill of `tokens` tokens and of collecting its attention scores, by sampling."""
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
    """Store, blocks `[B, NB]`, lengths `[B]` and queries of a decode step. Each of the `batch` requests has another
    length, at most `tokens`, in k4v4."""
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


def decode_rows(batch: int, tokens: int) -> list[dict]:
    """Times of one layer's decode step and of collecting its attention scores, for all requests and for one request in
    DECODE_STRIDE."""
    from kvc_kernels.decode.attention import DecodeAttention
    from kvc_kernels.scores.prefill_kernel import AttentionScores

    from . import layer

    store, rows, lens, q = sampled_step(batch, tokens)
    attend = DecodeAttention(store, max_batch=batch, max_blocks=rows.shape[1], query_heads=HEADS * GROUP)
    attend.plan(rows, lens)
    lse = torch.empty((batch, HEADS * GROUP), device="cuda")
    ms = timed(lambda: attend.run(0, q, scale=SCALE, lse=lse))
    times = {"attention": ms, "one layer": ms + layer.products_ms(batch)}
    out = [dict(case="score decode", name=name, prefix=tokens, new=batch, ms=ms) for name, ms in times.items()]
    for stride in (1, DECODE_STRIDE):
        sampling = ScoreSampling(reduce="sum", power=2, decode_stride=stride)
        op = AttentionScores(
            store, query_heads=HEADS * GROUP, sampling=sampling, max_batch=batch, max_blocks=rows.shape[1]
        )
        op.plan_decode(rows, lens)
        ms = timed(lambda op=op: op.add(0, q, lse, scale=SCALE))
        out.append(dict(case="score decode", name=f"one step in {stride}", prefix=tokens, new=batch, ms=ms))
    return out
