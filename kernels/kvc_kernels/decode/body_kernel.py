"""Tile loops of the Triton decode kernel: attention of one query group over the blocks of one work item.

Both bodies compute S^T = K . q^T and O^T = V^T . p^T. The query group is the N = 8 side of m16n8k16, and only GQA > 8
pays for 16 columns. With the group on the 16-row side, softmax and PV do twice the work on padding.
"""

# ruff: noqa: RUF005  (the compiler knows no unpacking inside tuples)
from __future__ import annotations

import triton
import triton.language as tl

from ..common.unpack_kernel import CODE_UNIT, LOG2E, NEG, capped, crumbs, nested

# p is scaled by 2^5, so that p * value_scale is not an fp16 subnormal. A value scale may reach 2047.
P_SHIFT: tl.constexpr = tl.constexpr(5.0)


@triton.jit
def _list_tiles(
    words, tile_pages, entries, n, counts, counts_stride, table, table_stride,
    CHUNK: tl.constexpr, TILE: tl.constexpr, MAX_TILES: tl.constexpr, T: tl.constexpr, STEP: tl.constexpr,
    SPAN: tl.constexpr, FROM_LIST: tl.constexpr, WINDOWED: tl.constexpr, ENDED: tl.constexpr,
):
    """List the tiles of `n` <= CHUNK blocks for the tile loop; return the number of tiles.

    `entries` int64 `[n]`: block << 32 | tokens (the latter for bf16 blocks; packed ones have `counts`). `table` points
    to the first entry of this layer and head, which run by STEP (+1: high pages from the left, -1: low from the right).
    words int64 `[tiles]`: block << 32 | j << 24 | first token << 12 | tokens of the block, j the place in the chunk.
    tile_pages int32 `[tiles, SPAN]`: ids of the pages that a tile touches.

    The tile loop is therefore a single loop over blocks of ragged lengths, and no load in it waits for another load.
    WINDOWED: entries also have the first visible token at bit 16, and tiles before it are skipped. ENDED: a tile
    without tokens ends the list, because loops run by several warps read further ahead.
    """
    j = tl.arange(0, CHUNK)
    e = tl.load(entries + j, mask=j < n, other=0)
    if FROM_LIST:
        count = (e & 0xFFFF if WINDOWED else e & 0xFFFFFFFF).to(tl.int32)
    else:
        count = tl.load(counts + (e >> 32) * counts_stride, mask=j < n, other=0).to(tl.int32)
    tiles = tl.where(j < n, (count + TILE - 1) // TILE, 0)
    head = ((e >> 32) << 32) | (j.to(tl.int64) << 24) | count.to(tl.int64)
    i = tl.arange(0, MAX_TILES)
    tile = i[None, :]
    if WINDOWED:
        before = ((e >> 16) & 0xFFFF).to(tl.int32) // TILE
        tiles = tl.maximum(tiles - before, 0)
        tile = tile + before[:, None]
    at = tl.cumsum(tiles, 0) - tiles
    word = head[:, None] | (tile.to(tl.int64) * TILE << 12)
    used = i[None, :] < tiles[:, None]
    to = at[:, None] + i[None, :]
    tl.store(words + to, word, mask=used)
    row = table + (e >> 32) * table_stride
    for k in tl.static_range(SPAN):
        entry = tile * TILE // T + k
        live = used & (entry * T < count[:, None])
        page = tl.load(row[:, None] + STEP * entry, mask=live, other=0)
        tl.store(tile_pages + to * SPAN + k, page, mask=used)
    total = tl.sum(tiles, 0)
    if ENDED:
        end = tl.arange(0, 2)
        tl.store(words + total + end, tl.zeros([2], tl.int64))
        for k in tl.static_range(SPAN):
            tl.store(tile_pages + (total + end) * SPAN + k, tl.zeros([2], tl.int32))
    return total


@triton.jit
def _tile_pages(tile_pages, i, SPAN: tl.constexpr):
    out = ()
    for k in tl.static_range(SPAN):
        out = out + (tl.load(tile_pages + i * SPAN + k),)
    return out


@triton.jit
def _page_pointers(
    pages, ids, page_bytes, t0, t, TILE: tl.constexpr, T: tl.constexpr, SPAN: tl.constexpr, GRAIN: tl.constexpr
):
    """(page pointer, first slot, slots `[TILE]`): token t0 + t lies at slot first + slots of its page.

    If a page holds whole tiles, the pointer is a scalar and `slots` is constant, so a tile's addresses are one base and
    immediate offsets. Otherwise the pointer is a tensor `[TILE]` selected from the few pages that a tile touches. GRAIN
    divides T: GRAIN consecutive tokens always share a page, and the compiler needs this to read them as a vector.
    """
    base = pages + ids[0].to(tl.int64) * page_bytes
    first = t0 * 0
    slots = t
    if T % TILE == 0:
        first = tl.multiple_of(t0 % T, TILE)
    elif TILE % T == 0:
        for k in tl.static_range(1, SPAN):
            base = tl.where(t >= k * T, pages + ids[k].to(tl.int64) * page_bytes, base)
        slots = t % T
    else:
        at = t0 % T + t
        slots = at
        for k in tl.static_range(1, SPAN):
            base = tl.where(at >= k * T, pages + ids[k].to(tl.int64) * page_bytes, base)
            slots = tl.where(at >= k * T, at - k * T, slots)
        slots = tl.max_contiguous(tl.multiple_of(slots, GRAIN), GRAIN)
    if SPAN > 1:
        base = tl.max_constancy(tl.multiple_of(base, 16), GRAIN)
    return base, first, slots


@triton.jit
def _spread(base, SPAN: tl.constexpr, AXIS: tl.constexpr):
    """Pointer tensor `[TILE]` as column (AXIS 1) or row (0) of a 2D one; scalars stay scalars."""
    if SPAN == 1:
        return base
    elif AXIS == 1:
        return base[:, None]
    else:
        return base[None, :]


@triton.jit
def packed_part(
    acc, m, l, zs, q, words, tile_pages, qz_scratch, n_tiles,
    pages, page_bytes, headers, header_stride, scale, cap, unseen,
    D: tl.constexpr, NQ: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, T: tl.constexpr, SPAN: tl.constexpr,
    VOFF: tl.constexpr, VMETA: tl.constexpr, CAPPED: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr, WARPS: tl.constexpr, ASM: tl.constexpr, WINDOWED: tl.constexpr,
):
    """Add `n_tiles` tiles of packed tokens to the running softmax. With WINDOWED, the first tile's first `unseen`
    tokens are masked.

    acc: fp32 `[D*VB/8 (at most 32 if VB is 2), NQ]` per row part and tensor of `nested` or `crumbs`, in units of 2^-24.
    m fp32 `[NQ]`. l, and per value group zs: fp32 `[16*WARPS, NQ]`, sums of p and p * zero, reduced over rows at the
    very end. q: fp16 `[D*KB/8, NQ]` per field, from the highest j down, holding q * 2^(-KB*j). `headers` is at this
    layer and head.
    """
    DK: tl.constexpr = D * KB // 8
    DV: tl.constexpr = D * VB // 8
    NKF: tl.constexpr = 8 // KB
    NVF: tl.constexpr = 8 // VB
    ROWS: tl.constexpr = DV if VB > 2 or DV < 32 else 32  # rows of one field that share a value group
    PARTS: tl.constexpr = DV // ROWS
    GROUPS: tl.constexpr = D // 32 if VB == 2 else 1
    ROW_GROUP: tl.constexpr = D if VB > 2 else 32
    FOLD: tl.constexpr = TILE // (16 * WARPS)
    c = scale * (LOG2E * CODE_UNIT)
    c = c * (255 // ((1 << KB) - 1))
    if CAPPED:
        c = c / LOG2E
    t = tl.arange(0, TILE)
    dk = tl.arange(0, DK)
    rows = tl.arange(0, ROWS)
    heads = tl.arange(0, NQ)
    word = tl.load(words)
    ids = _tile_pages(tile_pages, 0, SPAN)
    for i in tl.range(0, n_tiles, num_stages=STAGES):
        block = word >> 32
        count = (word & 0xFFF).to(tl.int32)
        t0 = tl.multiple_of(((word >> 12) & 0xFFF).to(tl.int32), TILE)
        ok = t < count - t0
        if WINDOWED:
            ok = ok & ((t >= unseen) | (i > 0))
        base, first, slots = _page_pointers(pages, ids, page_bytes, t0, t, TILE, T, SPAN, 16)
        # Value masks have the grain of their vectors, 16 tokens. Key rows are masked one by one: in part-filled tiles
        # the rows after the tokens are up to a tenth of all bytes read.
        ok16 = tl.max_constancy((t // 16) * 16 < count - t0, 16)
        codes = tl.load(
            _spread(base + first * DK, SPAN, 1) + ((slots * DK)[:, None] + dk[None, :]), mask=ok[:, None], other=0
        )
        values = ()
        for r in tl.static_range(PARTS):
            at = slots[None, :] + (rows * T + (VOFF + r * ROWS * T))[:, None]
            values = values + (tl.load(_spread(base + first, SPAN, 0) + at, mask=ok16[None, :], other=0),)
        meta = (base + VMETA).to(tl.pointer_type(tl.float16)) + first + slots
        vscale = ()
        vzero = ()
        for g in tl.static_range(GROUPS):
            vscale = vscale + (tl.load(meta + 2 * g * T, mask=ok16, other=0.0),)
            vzero = vzero + (tl.load(meta + (2 * g + 1) * T, mask=ok16, other=0.0),)
        j24 = (word >> 24) & 0xFF
        word = tl.load(words + i + 1)
        ids = _tile_pages(tile_pages, i + 1, SPAN)

        kf = nested(codes, KB, ASM)
        s = tl.zeros([TILE, NQ], tl.float32)
        # Query of the highest field first; each further tensor of `nested` holds the difference to the one before.
        above = tl.zeros([DK, NQ], tl.float16)
        for k in tl.static_range(NKF):
            ks = tl.load(headers + block * header_stride + (NKF - 1 - k) * DK + dk)
            scaled = q[k] * ks[:, None]
            if k == 0:
                s = tl.dot(kf[0], scaled, s)
            else:
                s = tl.dot(kf[k], scaled - above, s)
            above = scaled
        qz = tl.load(qz_scratch + j24 * NQ + heads)
        if CAPPED:
            s = capped(s * c + qz[None, :], cap) * LOG2E
            s = tl.where(ok[:, None], s, NEG)
            mn = tl.maximum(m, tl.max(s, 0))
            p = tl.exp2(s - (mn - P_SHIFT)[None, :])
        else:
            # The maximum of the raw products is sufficient (c > 0): one FMA per element serves scale, zero and max.
            s = tl.where(ok[:, None], s, NEG)
            mn = tl.maximum(m, tl.max(s, 0) * c + qz)
            p = tl.exp2(s * c + (qz - mn + P_SHIFT)[None, :])
        a = tl.exp2(m - mn)
        m = mn
        l = l * a[None, :] + tl.sum(tl.reshape(p, (FOLD, 16 * WARPS, NQ)), 0)
        z_next = ()
        for g in tl.static_range(GROUPS):
            pz = p * tl.where(ok, vzero[g], 0.0).to(tl.float32)[:, None]
            z_next = z_next + (zs[g] * a[None, :] + tl.sum(tl.reshape(pz, (FOLD, 16 * WARPS, NQ)), 0),)
        zs = z_next
        p16 = p.to(tl.float16)
        acc_next = ()
        for r in tl.static_range(PARTS):
            vf = crumbs(values[r], ASM) if VB == 2 else nested(values[r], VB, ASM)
            for j in tl.static_range(NVF):
                weight = p16 * tl.where(ok, vscale[(j * DV + r * ROWS) // ROW_GROUP], 0.0)[:, None]
                acc_next = acc_next + (tl.dot(vf[j], weight, acc[r * NVF + j] * a[None, :]),)
        acc = acc_next
    return acc, m, l, zs


@triton.jit
def plain_part(
    acc, m, l, q, words, tile_pages, n_tiles, pages, page_bytes, scale, cap, unseen, last, hidden,
    D: tl.constexpr, NQ: tl.constexpr, T: tl.constexpr, SPAN: tl.constexpr, VOFF: tl.constexpr, CAPPED: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr, WARPS: tl.constexpr, ASM: tl.constexpr, WINDOWED: tl.constexpr,
    MULTI: tl.constexpr,
):
    """Add `n_tiles` tiles of uncompressed tokens. acc fp32 `[D, NQ]`, q model dtype `[D, NQ]`, m and l as in
    `packed_part`.

    MULTI: a query does not see the last `hidden[NQ]` tokens of the block at place `last` of the chunk.
    """
    FOLD: tl.constexpr = TILE // (16 * WARPS)
    c = scale * LOG2E
    t = tl.arange(0, TILE)
    d = tl.arange(0, D)
    word = tl.load(words)
    ids = _tile_pages(tile_pages, 0, SPAN)
    for i in tl.range(0, n_tiles, num_stages=STAGES):
        count = (word & 0xFFF).to(tl.int32)
        t0 = tl.multiple_of(((word >> 12) & 0xFFF).to(tl.int32), TILE)
        ok = t < count - t0
        if WINDOWED:
            ok = ok & ((t >= unseen) | (i > 0))
        base, first, slots = _page_pointers(pages, ids, page_bytes, t0, t, TILE, T, SPAN, 4)
        row = _spread(base.to(tl.pointer_type(q.dtype)) + first * D, SPAN, 1)
        at = (slots * D)[:, None] + d[None, :]
        k = tl.load(row + at, mask=ok[:, None], other=0.0)
        v = tl.load(row + (at + VOFF // 2), mask=ok[:, None], other=0.0)
        if MULTI:
            unseen_end = tl.where(((word >> 24) & 0xFF).to(tl.int32) == last, hidden, 0)
            seen = t[:, None] < (count - t0 - unseen_end)[None, :]
        else:
            seen = ok[:, None]
        word = tl.load(words + i + 1)
        ids = _tile_pages(tile_pages, i + 1, SPAN)
        if not ASM:  # the interpreter multiplies bf16 words as integers
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        s = tl.dot(k, q.to(k.dtype))
        if CAPPED:
            s = capped(s * scale, cap) * LOG2E
        else:
            s = s * c
        s = tl.where(seen, s, NEG)
        mn = tl.maximum(m, tl.max(s, 0))
        p = tl.exp2(s - (mn - P_SHIFT)[None, :])
        if MULTI:  # a query that sees nothing of its first tile has a maximum of NEG
            p = tl.where(seen, p, 0.0)
        a = tl.exp2(m - mn)
        m = mn
        l = l * a[None, :] + tl.sum(tl.reshape(p, (FOLD, 16 * WARPS, NQ)), 0)
        acc = tl.dot(tl.trans(v), p.to(v.dtype), acc * a[None, :])
    return acc, m, l
