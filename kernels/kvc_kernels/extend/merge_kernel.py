"""Merge of attention states: outputs over disjoint sets of tokens and their log-sum-exps (base 2)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.unpack_kernel import NEG


@triton.jit
def merge_splits_kernel(
    part_o, part_lse, merges, out, out_lse,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, ROWS: tl.constexpr, LSE: tl.constexpr,
):
    """Merge the states of the KV splits of query tiles. grid (merges, BM / ROWS, H). merges int32 `[n, 5]`: first
    query, first row, end row, first slot, slots.
    """
    merge = merges + tl.program_id(0) * 5
    h = tl.program_id(2)
    start = tl.load(merge)
    end = tl.load(merge + 2)
    slot = tl.load(merge + 3).to(tl.int64)
    slots = tl.load(merge + 4)
    within = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row = tl.load(merge + 1) + within
    valid = row < end
    place = (start + row // G).to(tl.int64) * (H * G) + h * G + row % G
    d = tl.arange(0, D)
    m = tl.full([ROWS], NEG, tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    for s in range(0, slots):
        i = ((slot + s) * H + h) * BM + within
        lse = tl.load(part_lse + i, mask=valid, other=NEG)
        o = tl.load(part_o + i[:, None] * D + d[None, :], mask=valid[:, None], other=0.0)
        mn = tl.maximum(m, lse)
        a = tl.exp2(m - mn)
        b = tl.where(lse > NEG, tl.exp2(lse - mn), 0.0)
        acc = acc * a[:, None] + o * b[:, None]
        l = l * a + b
        m = mn
    divisor = tl.where(l > 0, l, 1.0)
    x = acc / divisor[:, None]
    tl.store(out + place[:, None] * D + d[None, :], x.to(out.dtype.element_ty), mask=valid[:, None])
    if LSE:
        tl.store(out_lse + place, tl.where(l > 0, m + tl.log2(divisor), NEG), mask=valid)


# Slices of requests begin at any address; specializing on alignment would compile one kernel for each.
@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["a_lse", "b_lse", "out_lse"])
def _merge_states_kernel(a, a_lse, b, b_lse, out, out_lse, rows, D: tl.constexpr, ROWS: tl.constexpr):
    """Merge two states of the same rows. grid (rows / ROWS,). All `[rows, D]`, LSE (base 2) fp32 `[rows]`."""
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, D)
    live = i < rows
    la = tl.load(a_lse + i, mask=live, other=0.0)
    lb = tl.load(b_lse + i, mask=live, other=0.0)
    top = tl.maximum(la, lb)
    wa = tl.exp2(la - top)
    wb = tl.exp2(lb - top)
    at = i[:, None] * D + d[None, :]
    x = tl.load(a + at, mask=live[:, None], other=0.0).to(tl.float32)
    y = tl.load(b + at, mask=live[:, None], other=0.0).to(tl.float32)
    # All warps must have read the sums before one writes them in place.
    tl.debug_barrier()
    total = wa + wb
    mixed = (x * wa[:, None] + y * wb[:, None]) / total[:, None]
    tl.store(out + at, mixed.to(out.dtype.element_ty), mask=live[:, None])
    tl.store(out_lse + i, top + tl.log2(total), mask=live)


def merge_states(a: torch.Tensor, a_lse: torch.Tensor, b: torch.Tensor, b_lse: torch.Tensor, out, out_lse) -> None:
    """Merge the attention states of two disjoint sets of tokens; contiguous `[N, Hq, D]` and base-2 LSE fp32 `[N, Hq]`.

    `out`, `out_lse` may be the tensors of `a` or of `b`.
    """
    rows, dim = a_lse.numel(), a.shape[-1]
    _merge_states_kernel[(triton.cdiv(rows, 16),)](a, a_lse, b, b_lse, out, out_lse, rows, dim, 16, num_warps=4)
