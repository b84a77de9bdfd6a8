"""`count_queries` in one launch; it runs in every step of a server that collects attention scores."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..store import PageStore
from .reference import ScoreSampling

PLACES = 64  # blocks of a request per iteration


@triton.jit(do_not_specialize=["row_stride"])
def note_kernel(
    query_counts, row_blocks, row_stride, seq_lens, counted,
    P: tl.constexpr, STRIDE: tl.constexpr, DECODING: tl.constexpr, PLACES: tl.constexpr,
):
    """grid (B,). Requests share blocks; integer sums do not depend on the order."""
    r = tl.program_id(0).to(tl.int64)
    end = tl.load(seq_lens + r).to(tl.int32)
    first = end - 1
    if not DECODING:
        first = end - tl.load(counted + r).to(tl.int32)
    if end // STRIDE > first // STRIDE:
        for at in range(0, end // P, PLACES):
            j = at + tl.arange(0, PLACES)
            block_end = (j + 1) * P
            n = (end // STRIDE - tl.maximum(first, block_end) // STRIDE) * STRIDE
            block = tl.load(row_blocks + r * row_stride + j, mask=n > 0, other=0)
            tl.atomic_add(query_counts + block, n, mask=n > 0, sem="relaxed")


def count_queries_triton(
    store: PageStore,
    row_blocks: torch.Tensor,
    seq_lens: torch.Tensor,
    counted: torch.Tensor | None,
    sampling: ScoreSampling,
) -> None:
    """`count_queries`, with all tensors on the device."""
    decoding = counted is None
    note_kernel[(len(seq_lens),)](
        store.query_counts, row_blocks, row_blocks.stride(0), seq_lens, seq_lens if decoding else counted,
        store.layout.block_tokens, sampling.decode_stride if decoding else sampling.stride, decoding, PLACES,
        num_warps=1,
    )  # fmt: skip
