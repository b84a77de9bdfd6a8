"""Packing of a prompt on the GPU: scores, and bytes for given tokens, match the CPU's, without a sync."""

from __future__ import annotations

import pytest
import torch

from kvc_kernels import ops
from kvc_kernels.formats import BF16, FORMATS
from kvc_kernels.layout import BlockFormat, PoolLayout, page_bytes_for
from kvc_kernels.store import PageStore

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
L, H, D, P, FULL, TAIL, KEPT = 3, 4, 128, 128, 9, 40, 4
TOKENS = FULL * P + TAIL


def packed(device: str, before: int) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """Scores of all layers, pages by competition, and digests of the kept blocks for tokens drawn with the seed. If the
    first `before` blocks are already packed, the result lies in other blocks."""
    fmt, gen = FORMATS["k4v4"], torch.Generator().manual_seed(5)
    layout = PoolLayout(L, H, D, P, page_bytes_for(fmt, 64, head_dim=D, has_scores=False))
    store = PageStore.create(
        layout, (BlockFormat(BF16), BlockFormat(fmt)), num_pages=1 + 12 * layout.block_pages_bf16, num_blocks=17,
        dtype=torch.bfloat16, device=device,
    )  # fmt: skip
    k, v = (torch.randn(L, TOKENS, H, D, generator=gen).bfloat16().to(device) for _ in range(2))
    q = torch.randn(L, 8, 2 * H, D, generator=gen).bfloat16().to(device)
    best = torch.rand(L, H, FULL * P, generator=gen).argsort(-1)[..., : KEPT * P].int().to(device)
    pages = torch.randint(0, 2 * KEPT + 1, (L, H), generator=gen).to(device)
    blocks, at = torch.arange(11, 1, -1, device=device), torch.arange(TOKENS, device=device)
    ops.take_bf16(store, blocks)
    queries, gaps = ops.LastQueries(store, 2 * H, 8), ops.RowGaps(4, store.device)
    for layer in range(L):
        ops.append(store, layer, blocks[at // P], at % P, k[layer], v[layer])
    if before:
        ops.compact(store, blocks[:before], 1, None, from_format=0)
    targets = torch.arange(12, 12 + KEPT, device=device) if before else blocks[:KEPT]
    rows, block_table = torch.tensor([1, 3], device=device), torch.zeros((2, 10), dtype=torch.int32, device=device)
    mode = torch.cuda.get_sync_debug_mode() if device == "cuda" else 0
    try:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        scores, worth = [], []
        for layer in range(L):
            queries.add(layer, q[layer], scale=0.09, logit_cap=0.0)
        for layers in queries.groups(2):
            part = ops.prompt_scores(store, layers, blocks, TOKENS, queries, packed=before, format_id=1).flatten(0, 1)
            pooled = ops.carry_scores(ops.pool_scores(part, 7), 48, 0.1)[:, : FULL * P]
            worth.append(ops.ranked_tokens(pooled, KEPT * P, 64, 4, 0)[1])
            scores.append(part)
        page_counts = ops.sequence_quota(torch.cat(worth), 40, 1)
        ops.pack_kept(store, blocks[:FULL], KEPT, 1, best, pages, packed=before, into=targets)
        gaps.open(3, KEPT, FULL - KEPT)
        gaps.close_up(block_table, rows)
        gaps.close(3)
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode(mode)
    ops.check_invariants(store)
    assert int(page_counts.sum()) == 40
    return torch.cat(scores).cpu(), page_counts.cpu(), [ops.block_digest(store, int(b)) for b in targets]


@pytest.mark.parametrize("before", [0, 4])
def test_the_gpu_does_what_the_cpu_does(before):
    scores, _, digests = packed("cuda", before)
    want, _, right = packed("cpu", before)
    torch.testing.assert_close(scores, want, rtol=2e-3, atol=1e-6)
    assert digests == right


def test_ranking_of_many_heads_never_makes_host_wait():
    """PyTorch sorts 128 rows and more in another way than few."""
    scores = torch.rand(160, 5000, generator=torch.Generator().manual_seed(1)).cuda()
    mode = torch.cuda.get_sync_debug_mode()
    try:
        torch.cuda.set_sync_debug_mode("error")
        pooled = ops.carry_scores(ops.pool_scores(scores, 7), 48, 0.1)
        best, worth = ops.ranked_tokens(pooled, 1024, 64, 4, 8)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    want, want_worth = ops.ranked_tokens(pooled.cpu(), 1024, 64, 4, 8)
    assert torch.equal(best.cpu(), want) and torch.equal(worth.cpu(), want_worth)
