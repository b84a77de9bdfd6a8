"""Attention of a tile of query rows over runs of keys: the inner loops of `ExtendAttention`.

A tile is BM rows (new token x query head of one group) of one KV head. Every tile of keys and values is dequantized to
fp16 once, on its way into shared memory, and serves all BM rows. (Decode folds scales into q and p instead; with 64
rows and more that costs as many instructions as it saves, and here the zeros come for free in the same FMA.)

The output accumulator is a tuple of D / WIDTH tensors `[BM, WIDTH]`: WIDTH features are the smallest run that every
format of the store can cut its values into, so that all classes share it.
"""

# ruff: noqa: RUF005  (the compiler knows no unpacking inside tuples)
from __future__ import annotations

import triton
import triton.language as tl

from ..common.unpack_kernel import LOG2E, NEG, capped, dequant, key_scales


@triton.jit
def list_tiles(
    scratch, entries, n, counts, counts_stride,
    CHUNK: tl.constexpr, TILE: tl.constexpr, MAX_TILES: tl.constexpr, FROM_LIST: tl.constexpr,
    MARK: tl.constexpr,
):
    """Write the tiles of `n` <= CHUNK blocks to `scratch` and return their number.

    `entries` int64 `[n]`: block << 32 | tokens (the latter for bf16 blocks; packed ones have `counts`). A tile is
    block << 32 | MARK << 24 | first token << 12 | tokens of the block. So the loop over tiles is flat, ragged blocks
    cost no empty iterations and loads are pipelined across blocks. MAX_TILES: tiles of a block, rounded up to a power
    of two.
    """
    j = tl.arange(0, CHUNK)
    e = tl.load(entries + j, mask=j < n, other=0)
    if FROM_LIST:
        count = (e & 0xFFFFFFFF).to(tl.int32)
    else:
        count = tl.load(counts + (e >> 32) * counts_stride, mask=j < n, other=0).to(tl.int32)
    tiles = tl.where(j < n, (count + TILE - 1) // TILE, 0)
    at = tl.cumsum(tiles, 0) - tiles
    i = tl.arange(0, MAX_TILES)
    head = ((e >> 32) << 32) | (MARK << 24) | count.to(tl.int64)
    word = head[:, None] | ((i * TILE).to(tl.int64) << 12)[None, :]
    tl.store(scratch + at[:, None] + i[None, :], word, mask=i[None, :] < tiles[:, None])
    return tl.sum(tiles, 0)


@triton.jit
def locate(pages, row, page_bytes, t0, count, t, T: tl.constexpr, STEP: tl.constexpr, RUN: tl.constexpr):
    """Page base pointer and slot `[TILE]` of tokens t0 + t; `row` points to the head's first table entry.

    STEP +1 or -1: high pages run from the left, low ones from the right. Tokens from `count` on lie in page 0. Runs of
    RUN tokens (16 in packed pages) share a page, which keeps loads along tokens 16 bytes wide.
    """
    e = (t0 + t) // T
    page = tl.load(row + STEP * e, mask=t0 + (t // RUN) * RUN < count, other=0).to(tl.int64)
    page = tl.max_constancy(page, RUN)
    slot = tl.max_contiguous(tl.multiple_of(t0 + t - e * T, RUN), RUN)
    return pages + page * page_bytes, slot


@triton.jit
def _probabilities(s, ok, m, scale, cap, CAPPED: tl.constexpr):
    """Logits `[BM, TILE]` (raw products) -> p, new maximum, factor for what was summed before."""
    if CAPPED:
        s = capped(s * scale, cap) * LOG2E
    else:
        s = s * (scale * LOG2E)
    s = tl.where(ok, s, NEG)
    mn = tl.maximum(m, tl.max(s, 1))
    # A row that has seen nothing must not take exp2(NEG - NEG) = 1 for masked tokens.
    p = tl.exp2(s - tl.where(mn > NEG, mn, 0.0)[:, None])
    return p, mn, tl.exp2(m - mn)


@triton.jit
def load_q(q_rows, valid, dtype: tl.constexpr, D: tl.constexpr, FIELDS: tl.constexpr):
    """Query rows in FIELDS pieces `[BM, D / FIELDS]`; `q_rows` pointers `[BM]`."""
    W: tl.constexpr = D // FIELDS
    d = tl.arange(0, W)
    out = ()
    for f in tl.static_range(FIELDS):
        x = tl.load(q_rows[:, None] + (f * W + d)[None, :], mask=valid[:, None], other=0.0)
        out = out + (x.to(dtype),)
    return out


@triton.jit
def packed_tiles(
    acc, m, l, q, scratch, n_tiles, pages, page_bytes, row, row_stride, header, header_stride, scale, cap,
    D: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, T: tl.constexpr, STEP: tl.constexpr,
    VOFF: tl.constexpr, VMETA: tl.constexpr, WIDTH: tl.constexpr, CAPPED: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):
    """Add `n_tiles` tiles, listed in `scratch`, of blocks in one packed format. q: fp16 `[BM, D*KB/8]` a field."""
    DK: tl.constexpr = D * KB // 8
    DV: tl.constexpr = D * VB // 8
    NKF: tl.constexpr = 8 // KB
    NVF: tl.constexpr = 8 // VB
    PARTS: tl.constexpr = DV // WIDTH
    GROUPS: tl.constexpr = D // 32 if VB == 2 else 1
    t = tl.arange(0, TILE)
    dk = tl.arange(0, DK)
    w = tl.arange(0, WIDTH)
    for i in tl.range(0, n_tiles, num_stages=STAGES):
        word = tl.load(scratch + i)
        block = word >> 32
        count = (word & 0xFFF).to(tl.int32)
        t0 = tl.multiple_of(((word >> 12) & 0xFFF).to(tl.int32), TILE)
        ok = t < count - t0
        base, slot = locate(pages, row + block * row_stride, page_bytes, t0, count, t, T, STEP, 16)
        codes = tl.load((base + slot * DK)[:, None] + dk[None, :])
        values = ()
        for r in tl.static_range(PARTS):
            values = values + (tl.load((base + slot + (VOFF + r * WIDTH * T))[None, :] + (w * T)[:, None]),)
        # Metas of slots that hold nothing may spell NaN, which would survive p = 0.
        meta = (base + VMETA).to(tl.pointer_type(tl.float16)) + slot
        vs = ()
        vz = ()
        for g in tl.static_range(GROUPS):
            vs = vs + (tl.load(meta + 2 * g * T, mask=ok, other=0.0)[None, :],)
            vz = vz + (tl.load(meta + (2 * g + 1) * T, mask=ok, other=0.0)[None, :],)
        ks, kz = key_scales(header + block * header_stride, KB, D)
        k = dequant(codes, ks, kz, KB, ASM)
        s = tl.dot(q[0], tl.trans(k[0]))
        for f in tl.static_range(1, NKF):
            s = tl.dot(q[f], tl.trans(k[f]), s)
        p, mn, a = _probabilities(s, ok[None, :], m, scale, cap, CAPPED)
        m = mn
        l = l * a + tl.sum(p, 1)
        p16 = p.to(tl.float16)
        done = ()
        for r in tl.static_range(PARTS):
            s4 = ()
            z4 = ()
            for f in tl.static_range(NVF):
                s4 = s4 + (vs[(f * DV + r * WIDTH) * GROUPS // D],)
                z4 = z4 + (vz[(f * DV + r * WIDTH) * GROUPS // D],)
            x = dequant(values[r], s4, z4, VB, ASM)
            for f in tl.static_range(NVF):
                done = done + (tl.dot(p16, tl.trans(x[f]), acc[f * PARTS + r] * a[:, None]),)
        # `done` is ordered by part, then field; features by field, then part.
        acc = ()
        for j in tl.static_range(D // WIDTH):
            acc = acc + (done[(j % PARTS) * NVF + j // PARTS],)
    return acc, m, l


@triton.jit
def plain_tiles(
    acc, m, l, q, scratch, n_tiles, pages, page_bytes, row, row_stride, scale, cap,
    D: tl.constexpr, T: tl.constexpr, VOFF: tl.constexpr, WIDTH: tl.constexpr, CAPPED: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):
    """Add `n_tiles` tiles of uncompressed blocks. q: model dtype `[BM, D]`."""
    t = tl.arange(0, TILE)
    d = tl.arange(0, D)
    w = tl.arange(0, WIDTH)
    for i in tl.range(0, n_tiles, num_stages=STAGES):
        word = tl.load(scratch + i)
        count = (word & 0xFFF).to(tl.int32)
        t0 = tl.multiple_of(((word >> 12) & 0xFFF).to(tl.int32), TILE)
        ok = t < count - t0
        base, slot = locate(pages, row + (word >> 32) * row_stride, page_bytes, t0, count, t, T, 1, 1)
        kp = base.to(tl.pointer_type(q.dtype)) + slot * D
        k = tl.load(kp[:, None] + d[None, :])
        values = ()
        for j in tl.static_range(D // WIDTH):
            at = (kp + (VOFF // 2 + j * WIDTH))[:, None] + w[None, :]
            # Slots that were never written may spell NaN.
            values = values + (tl.load(at, mask=ok[:, None], other=0.0),)
        acc, m, l = add_dense(acc, m, l, q, k, values, ok[None, :], scale, cap, CAPPED, ASM)
    return acc, m, l


@triton.jit
def add_dense(acc, m, l, q, k, values, ok, scale, cap, CAPPED: tl.constexpr, ASM: tl.constexpr):
    """Add one tile: k `[TILE, D]`, values `[TILE, WIDTH]` each, ok `[BM or 1, TILE]`."""
    if not ASM:  # the interpreter multiplies bf16 words as integers
        q = q.to(tl.float32)
        k = k.to(tl.float32)
    s = tl.dot(q, tl.trans(k))
    p, mn, a = _probabilities(s, ok, m, scale, cap, CAPPED)
    l = l * a + tl.sum(p, 1)
    out = ()
    for j in tl.static_range(len(acc)):
        if ASM:
            out = out + (tl.dot(p.to(k.dtype), values[j], acc[j] * a[:, None]),)
        else:
            out = out + (tl.dot(p, values[j].to(tl.float32), acc[j] * a[:, None]),)
    return out, mn, l


@triton.jit
def causal_tiles(
    acc, m, l, q, k, v, k_stride, v_stride, token, last, scale, cap,
    D: tl.constexpr, WIDTH: tl.constexpr, CAPPED: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    ASM: tl.constexpr,
):
    """Add the new tokens themselves, from dense rows. `token[BM]`: the rows' own tokens;
    keys 0..last-1; k, v pointers to the request's first row of this head.
    """
    t = tl.arange(0, TILE)
    d = tl.arange(0, D)
    w = tl.arange(0, WIDTH)
    for t0 in tl.range(0, last, TILE, num_stages=STAGES):
        at = (t0 + t).to(tl.int64)
        live = at < last
        kt = tl.load(k + at[:, None] * k_stride + d[None, :], mask=live[:, None], other=0.0)
        values = ()
        for j in tl.static_range(D // WIDTH):
            x = tl.load(v + at[:, None] * v_stride + (j * WIDTH + w)[None, :], mask=live[:, None], other=0.0)
            values = values + (x,)
        ok = (t0 + t)[None, :] <= token[:, None]
        acc, m, l = add_dense(acc, m, l, q, kt, values, ok, scale, cap, CAPPED, ASM)
    return acc, m, l
