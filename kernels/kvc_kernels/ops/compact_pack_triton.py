"""Quantise and pack the kept tokens of uncompressed heads: one program a (block, layer, head).

Writes the bytes that `compact._move` writes, bit for bit: the same fp32 operations in the same order, IEEE division,
round half to even, codes from the fp16-rounded scales. Nothing is shared between programs, so no order decides.
"""

# ruff: noqa: RUF005  (the compiler knows no unpacking inside tuples)
from __future__ import annotations

import triton
import triton.language as tl

HALF_MAX: tl.constexpr = tl.constexpr(65504.0)
# Adding and subtracting 1.5 * 2^23 rounds a float to a whole number, half to even; larger ones are clamped anyway.
ROUNDER: tl.constexpr = tl.constexpr(12582912.0)


@triton.jit
def half_range(lo, hi, steps: tl.constexpr):
    """fp16 scale and zero of fp32 ranges cut into `steps` steps."""
    lo = tl.minimum(tl.maximum(lo, -HALF_MAX), HALF_MAX)
    hi = tl.minimum(tl.maximum(hi, -HALF_MAX), HALF_MAX)
    return tl.div_rn(hi - lo, tl.full(lo.shape, steps, tl.float32)).to(tl.float16), lo.to(tl.float16)


@triton.jit
def encode(x, scale, zero, BITS: tl.constexpr):
    """int32 codes of fp32 x under fp32 scale and zero of the same shape; a scale of 0 gives code 0."""
    y = tl.div_rn(x - zero, tl.where(scale > 0, scale, float("inf")))
    y = (y + ROUNDER) - ROUNDER
    return tl.minimum(tl.maximum(y, 0.0), (1 << BITS) - 1).to(tl.int32)


@triton.jit
def load_rows(rows, valid, D: tl.constexpr, W: tl.constexpr):
    """fp32 features of tokens in D / W pieces `[N, W]`; `rows` pointers `[N]`."""
    w = tl.arange(0, W)
    out = ()
    for j in tl.static_range(D // W):
        x = tl.load(rows[:, None] + (j * W + w)[None, :], mask=valid[:, None], other=0.0)
        out = out + (x.to(tl.float32),)
    return out


@triton.jit
def token_ranges(x, STEPS: tl.constexpr, GROUPS: tl.constexpr):
    """fp16 (scales, zeros) `[N]` a group, of pieces x; a group is a whole number of pieces."""
    PER: tl.constexpr = len(x) // GROUPS
    scales = ()
    zeros = ()
    for g in tl.static_range(GROUPS):
        lo = tl.min(x[g * PER], 1)
        hi = tl.max(x[g * PER], 1)
        for j in tl.static_range(1, PER):
            lo = tl.minimum(lo, tl.min(x[g * PER + j], 1))
            hi = tl.maximum(hi, tl.max(x[g * PER + j], 1))
        s, z = half_range(lo, hi, STEPS)
        scales = scales + (s,)
        zeros = zeros + (z,)
    return scales, zeros


@triton.jit
def write_values(
    page, i, held, valid, v, N: tl.constexpr, W: tl.constexpr, D: tl.constexpr, VB: tl.constexpr, T: tl.constexpr,
    VOFF: tl.constexpr, VMETA: tl.constexpr,
):
    """Quantise values, pieces `[N, W]` of tokens in slots i, and write their codes (transposed) and metas."""
    DV: tl.constexpr = D * VB // 8
    GROUPS: tl.constexpr = D // 32 if VB == 2 else 1
    w = tl.arange(0, W)
    vs, vz = token_ranges(v, (1 << VB) - 1, GROUPS)
    for g in tl.static_range(GROUPS):
        meta = (page + VMETA).to(tl.pointer_type(tl.float16)) + 2 * g * T + i
        tl.store(meta, tl.where(valid, vs[g], 0.0), mask=held)
        tl.store(meta + T, tl.where(valid, vz[g], 0.0), mask=held)
    for r in tl.static_range(DV // W):
        packed = tl.zeros([N, W], tl.int32)
        for f in tl.static_range(8 // VB):
            s = tl.broadcast_to(vs[(f * DV + r * W) * GROUPS // D].to(tl.float32)[:, None], (N, W))
            z = tl.broadcast_to(vz[(f * DV + r * W) * GROUPS // D].to(tl.float32)[:, None], (N, W))
            packed |= encode(v[f * (DV // W) + r], s, z, VB) << (VB * f)
        packed = tl.where(valid[:, None], packed, 0)
        at = page + VOFF + (r * W + w)[None, :] * T + i[:, None]
        tl.store(at, packed.to(tl.uint8), mask=held[:, None])


@triton.jit
def write_evidence(page, i, held, valid, score, token, SOFF: tl.constexpr, POFF: tl.constexpr):
    """Scores and positions of the tokens in slots i."""
    tl.store((page + SOFF).to(tl.pointer_type(tl.float32)) + i, tl.where(valid, score, 0.0), mask=held)
    place = tl.where(valid, token, 0).to(tl.int16)
    tl.store((page + POFF).to(tl.pointer_type(tl.int16)) + i, place, mask=held)


@triton.jit
def clear_slack(page, USED: tl.constexpr, page_bytes: tl.constexpr, SLACK: tl.constexpr):
    """Zeros behind the last segment; SLACK is their number rounded up to a power of two."""
    rest = tl.arange(0, SLACK)
    tl.store(page + USED + rest, tl.zeros([SLACK], tl.uint8), mask=rest < page_bytes - USED)


@triton.jit
def write_tier(
    pages, row_table, ids, n_pages, n, order, row_scale, row_zero, like,
    page_bytes: tl.constexpr, D: tl.constexpr, T0: tl.constexpr, VOFF0: tl.constexpr, SOFF0: tl.constexpr,
    KB: tl.constexpr, VB: tl.constexpr, T: tl.constexpr, TP: tl.constexpr, KMETA: tl.constexpr,
    VOFF: tl.constexpr, VMETA: tl.constexpr, SOFF: tl.constexpr, POFF: tl.constexpr, USED: tl.constexpr,
    SLACK: tl.constexpr, TOKEN_KEYS: tl.constexpr, SCORED: tl.constexpr,
):
    """Pages of one tier of one head: tokens order[0..n-1] of the source go to pages ids[0..n_pages-1].

    T tokens a page, TP rounded up to a power of two; the ...0 constants describe the source's bf16 pages; row_scale,
    row_zero: pointers to the key header (scale on the 8-bit grid). Slots behind n and the page's slack become zero.
    """
    DK: tl.constexpr = D * KB // 8
    DV: tl.constexpr = D * VB // 8
    NKF: tl.constexpr = 8 // KB
    W: tl.constexpr = 32 if VB == 2 and DV > 32 else DV
    dk = tl.arange(0, DK)
    i = tl.arange(0, TP)
    for j in range(0, n_pages):
        held = i < T
        valid = held & (j * T + i < n)
        token = tl.load(order + j * T + i, mask=valid, other=0).to(tl.int32)
        source = tl.load(row_table + token // T0, mask=valid, other=0).to(tl.int64)
        base = pages + source * page_bytes
        rows = base.to(tl.pointer_type(like.dtype.element_ty)) + (token % T0) * D
        page = pages + tl.load(ids + j).to(tl.int64) * page_bytes

        k = load_rows(rows, valid, D, DK)
        packed = tl.zeros([TP, DK], tl.int32)
        if TOKEN_KEYS:
            ks, kz = token_ranges(k, (1 << KB) - 1, 1)
            meta = (page + KMETA).to(tl.pointer_type(tl.float16)) + i
            tl.store(meta, tl.where(valid, ks[0], 0.0), mask=held)
            tl.store(meta + T, tl.where(valid, kz[0], 0.0), mask=held)
            for f in tl.static_range(NKF):
                s = tl.broadcast_to(ks[0].to(tl.float32)[:, None], (TP, DK))
                z = tl.broadcast_to(kz[0].to(tl.float32)[:, None], (TP, DK))
                packed |= encode(k[f], s, z, KB) << (KB * f)
        else:
            for f in tl.static_range(NKF):
                s = tl.load(row_scale + f * DK + dk).to(tl.float32) * (255 // ((1 << KB) - 1))
                z = tl.load(row_zero + f * DK + dk).to(tl.float32)
                s = tl.broadcast_to(s[None, :], (TP, DK))
                packed |= encode(k[f], s, tl.broadcast_to(z[None, :], (TP, DK)), KB) << (KB * f)
        packed = tl.where(valid[:, None], packed, 0)
        tl.store(page + i[:, None] * DK + dk[None, :], packed.to(tl.uint8), mask=held[:, None])

        v = load_rows(rows + VOFF0 // 2, valid, D, W)
        write_values(page, i, held, valid, v, TP, W, D, VB, T, VOFF, VMETA)
        if SCORED:
            score = tl.load((base + SOFF0).to(tl.pointer_type(tl.float32)) + token % T0, mask=valid, other=0.0)
            write_evidence(page, i, held, valid, score, token, SOFF, POFF)
        if USED < page_bytes:
            clear_slack(page, USED, page_bytes, SLACK)


@triton.jit
def pack_kernel(
    pages, row_table, ids, page_counts, blocks, tiers, order, headers, like,
    LH: tl.constexpr, E: tl.constexpr, D: tl.constexpr, P: tl.constexpr, PP: tl.constexpr,
    page_bytes: tl.constexpr, T0: tl.constexpr, VOFF0: tl.constexpr, SOFF0: tl.constexpr, HIGH: tl.constexpr,
    LOW: tl.constexpr, TOKEN_KEYS: tl.constexpr, SCORED: tl.constexpr, STEP: tl.constexpr,
):
    """grid (m,): rows are (block, layer, head). row_table int32 `[m, E]` source pages, ids int32 `[m, E]` destination
    pages (high, then low), page_counts int64 `[2, m]`, blocks `[n]`, tiers int8 `[m, P]`, order int16 `[m, P]` scratch,
    headers fp16 `[blocks, LH, 2, D]`. HIGH, LOW: tuples of `write_tier`'s constants; LOW is empty without a low tier.
    """
    row = tl.program_id(0).to(tl.int64)
    t = tl.arange(0, PP)
    tier = tl.load(tiers + row * P + t, mask=t < P, other=0)
    order += row * P
    row_table += row * E
    ids += row * E
    high = (tier == 2).to(tl.int32)
    n_high = tl.sum(high, 0)
    tl.store(order + tl.cumsum(high, 0) - 1, t.to(tl.int16), mask=high == 1)
    n = n_high
    if len(LOW) > 0:
        low = (tier == 1).to(tl.int32)
        n += tl.sum(low, 0)
        tl.store(order + n_high + tl.cumsum(low, 0) - 1, t.to(tl.int16), mask=low == 1)
    tl.debug_barrier()

    d = tl.arange(0, D)
    header = headers
    if not TOKEN_KEYS:
        lo = tl.full([D], float("inf"), tl.float32)
        hi = tl.full([D], float("-inf"), tl.float32)
        i = tl.arange(0, STEP)
        for at in range(0, n, STEP):
            valid = at + i < n
            token = tl.load(order + at + i, mask=valid, other=0).to(tl.int32)
            source = tl.load(row_table + token // T0, mask=valid, other=0).to(tl.int64)
            rows = (pages + source * page_bytes).to(tl.pointer_type(like.dtype.element_ty)) + (token % T0) * D
            k = tl.load(rows[:, None] + d[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
            lo = tl.minimum(lo, tl.min(tl.where(valid[:, None], k, float("inf")), 0))
            hi = tl.maximum(hi, tl.max(tl.where(valid[:, None], k, float("-inf")), 0))
        scale, zero = half_range(tl.where(n > 0, lo, 0.0), tl.where(n > 0, hi, 0.0), 255)
        header = headers + (tl.load(blocks + row // LH).to(tl.int64) * LH + row % LH) * (2 * D)
        tl.store(header + d, scale)
        tl.store(header + D + d, zero)
        tl.debug_barrier()
    m = tl.num_programs(0)
    pages_high = tl.load(page_counts + row).to(tl.int32)
    write_tier(
        pages, row_table, ids, pages_high, n_high, order, header, header + D, like, page_bytes, D, T0, VOFF0, SOFF0,
        HIGH[0], HIGH[1], HIGH[2], HIGH[3], HIGH[4], HIGH[5], HIGH[6], HIGH[7], HIGH[8], HIGH[9], HIGH[10],
        TOKEN_KEYS, SCORED,
    )  # fmt: skip
    if len(LOW) > 0:
        pages_low = tl.load(page_counts + m + row).to(tl.int32)
        write_tier(
            pages, row_table, ids + pages_high, pages_low, n - n_high, order + n_high, header, header + D, like,
            page_bytes, D, T0, VOFF0, SOFF0,
            LOW[0], LOW[1], LOW[2], LOW[3], LOW[4], LOW[5], LOW[6], LOW[7], LOW[8], LOW[9], LOW[10],
            TOKEN_KEYS, SCORED,
        )  # fmt: skip
