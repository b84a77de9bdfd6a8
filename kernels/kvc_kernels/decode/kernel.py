"""The Triton kernel of decode attention: one CTA takes the work items of a column for one KV head."""

# ruff: noqa: RUF005  (the compiler knows no unpacking inside tuples)
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ..common.format_class import (
    KEY_BITS,
    SIDE,
    STAGES,
    TILE_PAGES,
    TILE_TOKENS,
    TOKENS,
    VALUE_BITS,
    VALUE_CODES,
    VALUE_META,
)
from ..common.unpack_kernel import CODE_UNIT, LOG2E, NEG
from ..compact.write_kernel import padded
from .body_kernel import P_SHIFT, _list_tiles, packed_part, plain_part


@triton.jit
def _zero_products(
    qz, q, zeros, header_stride, entries, n, factor,
    D: tl.constexpr, NQ: tl.constexpr, KB: tl.constexpr, CHUNK: tl.constexpr,
):
    """qz fp32 `[CHUNK, NQ]` = factor * q . zero of each block's header, by a small MMA whose rows are the blocks."""
    DK: tl.constexpr = D * KB // 8
    NF: tl.constexpr = 8 // KB
    j = tl.arange(0, CHUNK)
    dk = tl.arange(0, DK)
    block = tl.load(entries + j, mask=j < n, other=0) >> 32
    s = tl.zeros([CHUNK, NQ], tl.float32)
    for k in tl.static_range(NF):
        at = zeros + (block * header_stride)[:, None] + ((NF - 1 - k) * DK + dk)[None, :]
        zero = tl.load(at, mask=(j < n)[:, None], other=0.0)
        s += tl.dot(zero, q[k]) * (1 << (KB * (NF - 1 - k)))
    heads = tl.arange(0, NQ)
    tl.store(qz + j[:, None] * NQ + heads[None, :], s * factor)


@triton.jit
def _unseen(entries, TILE: tl.constexpr, WINDOWED: tl.constexpr):
    """Number of tokens that the window hides in an item's first tile; only the first block can begin inside the window.
    """
    if WINDOWED:
        return ((tl.load(entries) >> 16) & 0xFFFF).to(tl.int32) % TILE
    else:
        return 0


@triton.jit
def _plain_program(
    q_row, live, out, ml, words, tile_pages, entries, blocks, pages, table, row, scale, cap, last, hidden,
    page_bytes: tl.constexpr, ROW_STRIDE: tl.constexpr, NQ: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    T: tl.constexpr, SPAN: tl.constexpr, VOFF: tl.constexpr, CHUNK: tl.constexpr, CAPPED: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr, WARPS: tl.constexpr, ASM: tl.constexpr, WINDOWED: tl.constexpr,
    MULTI: tl.constexpr,
):
    """One work item of uncompressed blocks. `row`: offset of this layer and head in a block's table.

    MULTI: of the item's block number `last`, a query row does not see the last `hidden[NQ]` tokens.
    """
    d = tl.arange(0, D)
    q = tl.load(q_row[None, :] + d[:, None], mask=live[None, :], other=0.0)
    acc = tl.zeros([D, NQ], tl.float32)
    m = tl.full([NQ], NEG, tl.float32)
    l = tl.zeros([16 * WARPS, NQ], tl.float32)
    unseen = _unseen(entries, TILE, WINDOWED)
    for first in range(0, blocks, CHUNK):
        n = tl.minimum(blocks - first, CHUNK)
        tiles = _list_tiles(
            words, tile_pages, entries + first, n, table, 0, table + row, ROW_STRIDE,
            CHUNK, TILE, padded(P // TILE), T, 1, SPAN, True, WINDOWED, WARPS > 1,
        )
        tl.debug_barrier()
        acc, m, l = plain_part(
            acc, m, l, q, words, tile_pages, tiles, pages, page_bytes, scale, cap,
            unseen, last - first, hidden, D, NQ, T, SPAN, VOFF, CAPPED, TILE, STAGES, WARPS, ASM, WINDOWED, MULTI,
        )
        tl.debug_barrier()
        if WINDOWED:
            unseen = unseen * 0
    tl.store(out[None, :] + d[:, None], acc, mask=live[None, :])
    tl.store(ml, m - P_SHIFT, mask=live)
    tl.store(ml + 1, tl.sum(l, 0), mask=live)


@triton.jit
def _packed_program(
    q_row, live, out, ml, words, tile_pages, qz, entries, blocks, pages, table, counts, headers, head, scale, cap,
    page_bytes: tl.constexpr, LH: tl.constexpr, E: tl.constexpr, NQ: tl.constexpr, D: tl.constexpr,
    P: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, T: tl.constexpr, SPAN: tl.constexpr, SIDE: tl.constexpr,
    VOFF: tl.constexpr, VMETA: tl.constexpr, CHUNK: tl.constexpr,
    CAPPED: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, WARPS: tl.constexpr, ASM: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """One work item of packed blocks in one format. `head` = layer * H + KV head."""
    DK: tl.constexpr = D * KB // 8
    DV: tl.constexpr = D * VB // 8
    ROWS: tl.constexpr = DV if VB > 2 or DV < 32 else 32
    ROW_GROUP: tl.constexpr = D if VB > 2 else 32
    dk = tl.arange(0, DK)
    q = ()
    for k in tl.static_range(8 // KB):
        at = q_row[None, :] + ((8 // KB - 1 - k) * DK + dk)[:, None]
        x = tl.load(at, mask=live[None, :], other=0.0).to(tl.float32)
        u = x * (1.0 / (1 << (KB * (8 // KB - 1 - k))))
        q = q + (u.to(tl.float16),)
    acc = ()
    for _ in tl.static_range((DV // ROWS) * (8 // VB)):
        acc = acc + (tl.zeros([ROWS, NQ], tl.float32),)
    zs = ()
    for _ in tl.static_range(D // ROW_GROUP):
        zs = zs + (tl.zeros([16 * WARPS, NQ], tl.float32),)
    m = tl.full([NQ], NEG, tl.float32)
    l = tl.zeros([16 * WARPS, NQ], tl.float32)
    row = table + head * E + SIDE * (E - 1)
    header = headers + head * (2 * D)
    unseen = _unseen(entries, TILE, WINDOWED)
    for first in range(0, blocks, CHUNK):
        n = tl.minimum(blocks - first, CHUNK)
        tiles = _list_tiles(
            words, tile_pages, entries + first, n, counts + head * 2 + SIDE, LH * 2, row, LH * E,
            CHUNK, TILE, padded(P // TILE), T, 1 - 2 * SIDE, SPAN, False, WINDOWED, WARPS > 1,
        )
        factor = scale if CAPPED else scale * LOG2E
        _zero_products(qz, q, header + D, LH * 2 * D, entries + first, n, factor, D, NQ, KB, CHUNK)
        tl.debug_barrier()
        acc, m, l, zs = packed_part(
            acc, m, l, zs, q, words, tile_pages, qz, tiles,
            pages, page_bytes, header, LH * 2 * D, scale, cap, unseen,
            D, NQ, KB, VB, T, SPAN, VOFF, VMETA, CAPPED, TILE, STAGES, WARPS, ASM, WINDOWED,
        )
        tl.debug_barrier()
        if WINDOWED:
            unseen = unseen * 0
    rows = tl.arange(0, ROWS)
    for r in tl.static_range(DV // ROWS):
        for f in tl.static_range(8 // VB):
            zero = tl.sum(zs[(f * DV + r * ROWS) // ROW_GROUP], 0)
            if VB == 2:
                field = acc[r * 4 + f]
            elif f == 8 // VB - 1:
                # `nested`: field f = F[n-1-f] - F[n-f], and F[n] = 0.
                field = acc[0] - acc[1] if VB == 4 else acc[0]
            else:
                field = acc[1]
            o = field * (CODE_UNIT / (1 << (VB * f))) + zero[None, :]
            tl.store(out[None, :] + (f * DV + r * ROWS + rows)[:, None], o, mask=live[None, :])
    tl.store(ml, m - P_SHIFT, mask=live)
    tl.store(ml + 1, tl.sum(l, 0), mask=live)


# `starts` is a slice at any address. Its alignment must not select another compiled kernel.
@triton.jit(do_not_specialize=["NB", "layer", "cap", "scale"], do_not_specialize_on_alignment=["starts", "sizes"])
def _decode_kernel(
    q_ptr, q_stride_b, q_stride_h, part_o, part_ml, scratch, items, column_ranges, lists,
    pages, table, counts, headers, NB, layer, scale, cap, starts, sizes,
    L: tl.constexpr, H: tl.constexpr, G: tl.constexpr, NQ: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    P: tl.constexpr, page_bytes: tl.constexpr, CLASSES: tl.constexpr, CHUNK: tl.constexpr,
    SCRATCH: tl.constexpr, WORDS: tl.constexpr, CAPPED: tl.constexpr, WARPS: tl.constexpr,
    ASM: tl.constexpr, WINDOWED: tl.constexpr, MULTI: tl.constexpr, PDL: tl.constexpr,
):
    """grid (columns * H,); a column is a persistent CTA's share of the work items. part_o fp32 `[items, H, G, D]`,
    part_ml fp32 `[items, H, G, 2]`.

    MULTI: request b has the queries starts[b] to starts[b + 1] (int32 `[B + 1]`), its last tokens, which lie in its
    last block. Partial results have NQ rows instead of G: row g is query g // G of the request and head g % G of the
    group. `sizes` int32 `[B, C]`: lengths of the lists. Without MULTI neither is read.
    """
    if PDL:
        gdc_wait()
    pid = tl.program_id(0)
    h = pid % H
    head = (layer * H + h).to(tl.int64)
    words = scratch + pid.to(tl.int64) * SCRATCH
    qz = (words + WORDS).to(tl.pointer_type(tl.float32))
    tile_pages = (words + WORDS + CHUNK * NQ // 2).to(tl.pointer_type(tl.int32))
    g = tl.arange(0, NQ)
    for item in range(tl.load(column_ranges + pid // H), tl.load(column_ranges + pid // H + 1)):
        request = tl.load(items + item * 4)
        cls = tl.load(items + item * 4 + 1)
        start = tl.load(items + item * 4 + 2)
        blocks = tl.load(items + item * 4 + 3)
        entries = lists + (request * len(CLASSES) + cls).to(tl.int64) * NB + start
        if MULTI:
            first = tl.load(starts + request)
            queries = tl.load(starts + request + 1) - first
            q_row = q_ptr + (first + g // G).to(tl.int64) * q_stride_b + (h * G + g % G) * q_stride_h
            part = (item * H + h).to(tl.int64) * NQ + g
            live = g < queries * G
            hidden = queries - 1 - g // G
            last = tl.load(sizes + request * len(CLASSES)) - 1 - start
        else:
            q_row = q_ptr + request.to(tl.int64) * q_stride_b + (h * G + g) * q_stride_h
            part = (item * H + h).to(tl.int64) * G + g
            live = g < G
            hidden = 0
            last = 0
        out = part_o + part * D
        ml = part_ml + part * 2
        for c in tl.static_range(len(CLASSES)):
            if cls == c:
                if CLASSES[c][KEY_BITS] == 16:
                    _plain_program(
                        q_row, live, out, ml, words, tile_pages, entries, blocks, pages, table, head * E, scale, cap,
                        last, hidden, page_bytes, L * H * E, NQ, D, P, CLASSES[c][TOKENS], CLASSES[c][TILE_PAGES],
                        CLASSES[c][VALUE_CODES], CHUNK, CAPPED, CLASSES[c][TILE_TOKENS], CLASSES[c][STAGES], WARPS,
                        ASM, WINDOWED, MULTI,
                    )
                else:
                    _packed_program(
                        q_row, live, out, ml, words, tile_pages, qz, entries, blocks, pages, table, counts, headers,
                        head, scale, cap, page_bytes, L * H, E, NQ, D, P, CLASSES[c][KEY_BITS], CLASSES[c][VALUE_BITS],
                        CLASSES[c][TOKENS], CLASSES[c][TILE_PAGES], CLASSES[c][SIDE],
                        CLASSES[c][VALUE_CODES], CLASSES[c][VALUE_META], CHUNK, CAPPED,
                        CLASSES[c][TILE_TOKENS], CLASSES[c][STAGES], WARPS, ASM, WINDOWED,
                    )
