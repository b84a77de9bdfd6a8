"""`keydiff` of whole uncompressed blocks in one launch, for all layers and heads.

In plain torch it takes 25 launches per layer, 800 for a block of a model of 32 layers: about as much host time as a
decode step. A head's sums have a fixed order, so its scores do not depend on the other blocks of the launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..formats import BF16
from ..store import PageStore

ROWS = 32  # tokens per iteration
EPSILON = 1e-12  # as in torch's `normalize`


@triton.jit
def _unit_rows(
    pages, like, row_table, t, live, page_bytes: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, T0: tl.constexpr,
    EPSILON: tl.constexpr,
):
    """Normalized keys fp32 `[N, DP]` of tokens t, zeros where not live."""
    d = tl.arange(0, DP)
    page = tl.load(row_table + t // T0, mask=live, other=0).to(tl.int64) * page_bytes
    rows = (pages + page).to(tl.pointer_type(like.dtype.element_ty)) + t % T0 * D
    k = tl.load(rows[:, None] + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    return k / tl.maximum(tl.sqrt(tl.sum(k * k, 1)), EPSILON)[:, None]


@triton.jit
def keydiff_kernel(
    pages, like, table, blocks, out,
    LH: tl.constexpr, E: tl.constexpr, P: tl.constexpr, page_bytes: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    T0: tl.constexpr, ROWS: tl.constexpr, EPSILON: tl.constexpr,
):
    """grid (n * LH,). out fp32 `[n, LH, P]`; `like`: the pages viewed in the model dtype."""
    row = tl.program_id(0).to(tl.int64)
    row_table = table + (tl.load(blocks + row // LH).to(tl.int64) * LH + row % LH) * E
    i = tl.arange(0, ROWS)
    center = tl.zeros([DP], tl.float32)
    for t0 in range(0, P, ROWS):
        center += tl.sum(_unit_rows(pages, like, row_table, t0 + i, t0 + i < P, page_bytes, D, DP, T0, EPSILON), 0)
    center = center / P
    center = center / tl.maximum(tl.sqrt(tl.sum(center * center, 0)), EPSILON)
    for t0 in range(0, P, ROWS):
        unit = _unit_rows(pages, like, row_table, t0 + i, t0 + i < P, page_bytes, D, DP, T0, EPSILON)
        tl.store(out + row * P + t0 + i, -tl.sum(unit * center[None, :], 1), mask=t0 + i < P)


def keydiff_blocks(store: PageStore, blocks: torch.Tensor) -> torch.Tensor:
    """`keydiff` of uncompressed `blocks[n]` up to rounding, fp32 `[n, L, H, P]`."""
    g, n = store.layout, blocks.numel()
    out = torch.empty((n, g.layers, g.heads, g.block_tokens), device=store.device)
    if n:
        keydiff_kernel[(n * g.layers * g.heads,)](
            store.pages, store.pages.view(store.dtype), store.table, blocks, out, g.layers * g.heads,
            g.head_pages_bf16, g.block_tokens, g.page_bytes, g.head_dim, triton.next_power_of_2(g.head_dim),
            g.page(BF16).tokens, ROWS, EPSILON, num_warps=4,
        )  # fmt: skip
    return out
