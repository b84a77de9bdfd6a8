"""Writes to a page that packing and repacking share: values, scores, positions and slack, but not key codes."""

# ruff: noqa: RUF005  (the compiler knows no unpacking inside tuples)
from __future__ import annotations

import triton
import triton.language as tl

from ..common.quant_kernel import ROUNDER_BITS, code_bits, greater, grid, half_range, lesser


@triton.jit
def token_ranges(x, FIRST: tl.constexpr, PER: tl.constexpr, STEPS: tl.constexpr, GROUPS: tl.constexpr):
    """fp16 (scales, zeros) `[N]` per group of PER pieces, of pieces x[FIRST], ..."""
    scales = ()
    zeros = ()
    for g in tl.static_range(GROUPS):
        lo = x[FIRST + g * PER]
        hi = lo
        for j in tl.static_range(1, PER):
            lo = lesser(lo, x[FIRST + g * PER + j])
            hi = greater(hi, x[FIRST + g * PER + j])
        s, z = half_range(tl.min(lo.to(tl.float32), 1), tl.max(hi.to(tl.float32), 1), STEPS)
        scales = scales + (s,)
        zeros = zeros + (z,)
    return scales, zeros


@triton.jit
def half_word(x, PLACE: tl.constexpr):
    """Bits of fp16 x at one of four places in an int64."""
    return (x.to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF) << (16 * PLACE)


@triton.jit
def write_values(
    page, i, in_page, v, N: tl.constexpr, W: tl.constexpr, D: tl.constexpr, VB: tl.constexpr, T: tl.constexpr,
    VOFF: tl.constexpr, VMETA: tl.constexpr, RUN: tl.constexpr,
):
    """Quantize values and write their codes (transposed) and metas. Rows of zeros write zeros.

    `i` `[N]` counts runs of RUN slots, 1 or 4. v: the pieces `[N, W]` of each slot of a run. Four slots form words,
    whose transposition costs a quarter of that of bytes.
    """
    DV: tl.constexpr = D * VB // 8
    GROUPS: tl.constexpr = D // 32 if VB == 2 else 1
    PIECES: tl.constexpr = D // W
    w = tl.arange(0, W)
    words = ()
    for _ in tl.static_range(DV // W):
        words = words + (tl.zeros([N, W], tl.int32),)
    metas = ()
    for _ in tl.static_range(2 * GROUPS):
        metas = metas + (tl.zeros([N], tl.int64),)
    for u in tl.static_range(RUN):
        vs, vz = token_ranges(v, u * PIECES, PIECES // GROUPS, (1 << VB) - 1, GROUPS)
        grids = ()
        sums = ()
        for g in tl.static_range(GROUPS):
            grids = grids + (grid(vs[g], vz[g], 1, VB),)
            sums = sums + (metas[2 * g] | half_word(vs[g], u), metas[2 * g + 1] | half_word(vz[g], u))
        metas = sums
        sums = ()
        for r in tl.static_range(DV // W):
            word = words[r]
            for f in tl.static_range(8 // VB):
                less, zero, inverse, top = grids[(f * DV + r * W) * GROUPS // D]
                x = v[u * PIECES + f * (DV // W) + r].to(tl.float32)
                bits = code_bits(x, less[:, None], zero[:, None], inverse[:, None], top[:, None])
                word += (bits - ROUNDER_BITS) << (8 * u + VB * f)
            sums = sums + (word,)
        words = sums
    for g in tl.static_range(2 * GROUPS):
        to = page + VMETA + 2 * g * T
        if RUN == 1:
            tl.store(to.to(tl.pointer_type(tl.int16)) + i, metas[g].to(tl.int16), mask=in_page)
        else:
            tl.store(to.to(tl.pointer_type(tl.int64)) + i, metas[g], mask=in_page)
    for r in tl.static_range(DV // W):
        row = (r * W + w)[None, :] * (T // RUN)
        if RUN == 1:
            tl.store((page + VOFF) + row + i[:, None], words[r].to(tl.uint8), mask=in_page[:, None])
        else:
            tl.store((page + VOFF).to(tl.pointer_type(tl.int32)) + row + i[:, None], words[r], mask=in_page[:, None])


@triton.jit
def write_evidence(page, i, in_page, valid, score, token, SOFF: tl.constexpr, POFF: tl.constexpr):
    """Write scores and positions of the tokens in slots i."""
    tl.store((page + SOFF).to(tl.pointer_type(tl.float32)) + i, tl.where(valid, score, 0.0), mask=in_page)
    place = tl.where(valid, token, 0).to(tl.int16)
    tl.store((page + POFF).to(tl.pointer_type(tl.int16)) + i, place, mask=in_page)


@triton.constexpr_function
def padded(n: int) -> int:
    """n rounded up to a power of two. SGLang replaces `triton.next_power_of_2` by a function that the compiler does not
    accept inside a kernel.
    """
    return 1 << (n - 1).bit_length()


@triton.jit
def clear_slack(page, END: tl.constexpr, page_bytes: tl.constexpr, N: tl.constexpr):
    """Write zeros after the last segment; N is their number rounded up to a power of two."""
    rest = tl.arange(0, N)
    tl.store(page + END + rest, tl.zeros([N], tl.uint8), mask=rest < page_bytes - END)
