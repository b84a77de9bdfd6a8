"""Attention of a tile of query rows over runs of keys: the inner loops of `extend_attention_triton`.

A tile is BM rows (new token x query head of one group) of one KV head. Every tile of keys and values is dequantised to
fp16 once, on its way into shared memory, and serves all BM rows. (Decode folds scales into q and p instead; with 64
rows and more that costs as many instructions as it saves, and here the zeros come for free in the same FMA.)

The output accumulator is a tuple of D / WIDTH tensors `[BM, WIDTH]`: WIDTH features are the smallest run that every
format of the ladder can cut its values into, so that all classes share it.
"""

# ruff: noqa: RUF005  (the compiler knows no unpacking inside tuples)
from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
NEG: tl.constexpr = tl.constexpr(-1.0e30)


@triton.jit
def _plain_codes(x, BITS: tl.constexpr, FIELD: tl.constexpr, s, z):
    """fp16 of field FIELD of bytes x: code * s + z, for the interpreter."""
    code = (x >> (BITS * FIELD)) & ((1 << BITS) - 1)
    return (code.to(tl.float32) * s.to(tl.float32) + z.to(tl.float32)).to(tl.float16)


@triton.jit
def dequant8(x, s, z, ASM: tl.constexpr):
    """uint8 codes [M, N] -> fp16 code * s + z; fp16 s, z of the same shape. 3 instructions for 2 elements."""
    if not ASM:
        return _plain_codes(x, 8, 0, s, z)
    # 0x64cc is the fp16 number 1024 + c; the FMA rounds once.
    return tl.inline_asm_elementwise(
        "{.reg .b32 a, b, m; mov.b32 m, 0xe400e400;"
        " prmt.b32 a, $2, 0x64646464, 0x4140; prmt.b32 b, $2, 0x64646464, 0x4342;"
        " add.f16x2 a, a, m; add.f16x2 b, b, m; fma.rn.f16x2 $0, a, $3, $5; fma.rn.f16x2 $1, b, $4, $6;}",
        "=r,=r,r,r,r,r,r", [x, s, z], dtype=tl.float16, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def dequant4(x, s0, z0, s1, z1, ASM: tl.constexpr):
    """Both fields of bytes [M, N] as fp16: code * s + z. 3.5 instructions for 2 elements."""
    if not ASM:
        return _plain_codes(x, 4, 0, s0, z0), _plain_codes(x, 4, 1, s1, z1)
    return tl.inline_asm_elementwise(
        "{.reg .b32 a, b, c, d, m, n, k; mov.b32 m, 0xe400e400; mov.b32 n, 0x2c002c00; mov.b32 k, 0xd400d400;"
        " prmt.b32 a, $4, 0, 0x4140; prmt.b32 b, $4, 0, 0x4342;"
        " lop3.b32 c, a, 0x000f000f, 0x64006400, 0xea; lop3.b32 d, b, 0x000f000f, 0x64006400, 0xea;"
        " lop3.b32 a, a, 0x00f000f0, 0x64006400, 0xea; lop3.b32 b, b, 0x00f000f0, 0x64006400, 0xea;"
        " add.f16x2 c, c, m; add.f16x2 d, d, m; fma.rn.f16x2 a, a, n, k; fma.rn.f16x2 b, b, n, k;"
        " fma.rn.f16x2 $0, c, $5, $7; fma.rn.f16x2 $1, d, $6, $8;"
        " fma.rn.f16x2 $2, a, $9, $11; fma.rn.f16x2 $3, b, $10, $12;}",
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r", [x, s0, z0, s1, z1],
        dtype=(tl.float16, tl.float16), is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def _dequant2_half(x, s0, z0, s1, z1, HIGH: tl.constexpr, ASM: tl.constexpr):
    """Fields 0 and 1, or 2 and 3 (HIGH), of bytes with four 2-bit codes."""
    if not ASM:
        return _plain_codes(x, 2, 2 * HIGH, s0, z0), _plain_codes(x, 2, 2 * HIGH + 1, s1, z1)
    # 1024 + 4^f * c becomes c by one FMA: times 4^-f, minus 1024 * 4^-f.
    if HIGH:
        CONST: tl.constexpr = (
            "mov.b32 m, 0x2c002c00; mov.b32 k, 0xd400d400; mov.b32 n, 0x24002400; mov.b32 l, 0xcc00cc00;"
            " mov.b32 p, 0x00300030; mov.b32 q, 0x00c000c0;"
        )
    else:
        CONST: tl.constexpr = (
            "mov.b32 m, 0x3c003c00; mov.b32 k, 0xe400e400; mov.b32 n, 0x34003400; mov.b32 l, 0xdc00dc00;"
            " mov.b32 p, 0x00030003; mov.b32 q, 0x000c000c;"
        )
    return tl.inline_asm_elementwise(
        "{.reg .b32 a, b, c, d, m, n, k, l, p, q; " + CONST + " prmt.b32 a, $4, 0, 0x4140; prmt.b32 b, $4, 0, 0x4342;"
        " lop3.b32 c, a, p, 0x64006400, 0xea; lop3.b32 d, b, p, 0x64006400, 0xea;"
        " lop3.b32 a, a, q, 0x64006400, 0xea; lop3.b32 b, b, q, 0x64006400, 0xea;"
        " fma.rn.f16x2 c, c, m, k; fma.rn.f16x2 d, d, m, k; fma.rn.f16x2 a, a, n, l; fma.rn.f16x2 b, b, n, l;"
        " fma.rn.f16x2 $0, c, $5, $7; fma.rn.f16x2 $1, d, $6, $8;"
        " fma.rn.f16x2 $2, a, $9, $11; fma.rn.f16x2 $3, b, $10, $12;}",
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r", [x, s0, z0, s1, z1],
        dtype=(tl.float16, tl.float16), is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def dequant(x, s, z, BITS: tl.constexpr, ASM: tl.constexpr):
    """Bytes [M, N] -> 8 / BITS fp16 tensors [M, N]; `s`, `z` are tuples of fp16 tensors that broadcast to it."""
    shape: tl.constexpr = x.shape
    s2 = ()
    z2 = ()
    for f in tl.static_range(8 // BITS):
        s2 = s2 + (tl.broadcast_to(s[f], shape),)
        z2 = z2 + (tl.broadcast_to(z[f], shape),)
    if BITS == 8:
        return (dequant8(x, s2[0], z2[0], ASM),)
    elif BITS == 4:
        a, b = dequant4(x, s2[0], z2[0], s2[1], z2[1], ASM)
        return (a, b)
    else:
        a, b = _dequant2_half(x, s2[0], z2[0], s2[1], z2[1], False, ASM)
        c, d = _dequant2_half(x, s2[2], z2[2], s2[3], z2[3], True, ASM)
        return (a, b, c, d)


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
def capped(x, cap):
    """cap * tanh(x / cap), through exp2 because tl has no tanh; right at both ends."""
    return cap * (1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E / cap)) + 1.0))


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
    D: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, T: tl.constexpr, STEP: tl.constexpr, KMETA: tl.constexpr,
    VOFF: tl.constexpr, VMETA: tl.constexpr, WIDTH: tl.constexpr, TOKEN_KEYS: tl.constexpr, CAPPED: tl.constexpr,
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
        ks = ()
        kz = ()
        if TOKEN_KEYS:
            kmeta = (base + KMETA).to(tl.pointer_type(tl.float16)) + slot
            one = tl.load(kmeta, mask=ok, other=0.0)[:, None]
            two = tl.load(kmeta + T, mask=ok, other=0.0)[:, None]
            for _ in tl.static_range(NKF):
                ks = ks + (one,)
                kz = kz + (two,)
        else:
            at = header + block * header_stride + dk
            for f in tl.static_range(NKF):
                # On the grid of KB bits the scale is 1, 17 or 85 times as large.
                grid = tl.load(at + f * DK).to(tl.float32) * (255 // ((1 << KB) - 1))
                ks = ks + (grid.to(tl.float16)[None, :],)
                kz = kz + (tl.load(at + (D + f * DK))[None, :],)
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
        acc, m, l = _add_dense(acc, m, l, q, k, values, ok[None, :], scale, cap, CAPPED, ASM)
    return acc, m, l


@triton.jit
def _add_dense(acc, m, l, q, k, values, ok, scale, cap, CAPPED: tl.constexpr, ASM: tl.constexpr):
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
        acc, m, l = _add_dense(acc, m, l, q, kt, values, ok, scale, cap, CAPPED, ASM)
    return acc, m, l
