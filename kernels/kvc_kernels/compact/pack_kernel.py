"""Packing of the kept tokens of uncompressed heads: two programs per (block, layer, head), one for keys, one for
values.

The bytes are those of `reference._move`, bit for bit: the same fp32 operations in the same order, quotients as IEEE
division rounds them, round half to even, codes from the fp16-rounded scales. The two programs share only the order of
kept tokens, and both write the same one.
"""

# ruff: noqa: RUF005  (the compiler knows no unpacking inside tuples)
from __future__ import annotations

import triton
import triton.language as tl

from ..common.format_class import (
    KEY_BITS,
    POSITIONS,
    SCORES,
    TOKENS,
    USED_BYTES,
    VALUE_BITS,
    VALUE_CODES,
    VALUE_META,
)
from ..common.quant_kernel import ROUNDER_BITS, code_bits, greater, grid, half_range, lesser
from .write_kernel import clear_slack, padded, write_evidence, write_values


@triton.jit
def source_rows(
    pages, row_table, token, valid, like, page_bytes: tl.constexpr, D: tl.constexpr, T0: tl.constexpr
):
    """Start of the tokens' source pages, and pointers to their key rows."""
    source = tl.load(row_table + token // T0, mask=valid, other=0).to(tl.int64)
    base = pages + source * page_bytes
    return base, base.to(tl.pointer_type(like.dtype.element_ty)) + (token % T0) * D


@triton.jit
def load_rows(rows, valid, D: tl.constexpr, W: tl.constexpr):
    """Features of tokens in D / W pieces `[N, W]`, zeros where not valid. `rows`: pointers `[N]`."""
    w = tl.arange(0, W)
    out = ()
    for j in tl.static_range(D // W):
        out = out + (tl.load(rows[:, None] + (j * W + w)[None, :], mask=valid[:, None], other=0.0),)
    return out


@triton.jit
def load_runs(
    pages, row_table, order, first, i, live, n, like, page_bytes: tl.constexpr, D: tl.constexpr, T0: tl.constexpr,
    OFFSET: tl.constexpr, W: tl.constexpr, WHOLE: tl.constexpr,
):
    """Pieces of the four tokens first + 4 i, .. (of `order`, unless WHOLE), token by token. OFFSET: offset of the rows
    in a page, in elements.
    """
    out = ()
    token = first + 4 * i
    if WHOLE:
        # A page of the source holds a multiple of four tokens.
        valid = live & (token < n)
        _, rows = source_rows(pages, row_table, token, valid, like, page_bytes, D, T0)
        for u in tl.static_range(4):
            out = out + load_rows(rows + (OFFSET + u * D), valid, D, W)
    else:
        for u in tl.static_range(4):
            valid = live & (token + u < n)
            x = tl.load(order + token + u, mask=valid, other=0).to(tl.int32)
            _, rows = source_rows(pages, row_table, x, valid, like, page_bytes, D, T0)
            out = out + load_rows(rows + OFFSET, valid, D, W)
    return out


@triton.jit
def channel_grids(header, D: tl.constexpr, KB: tl.constexpr):
    """`grid` of each piece of D * KB / 8 channels, from a header that this program has written."""
    DK: tl.constexpr = D * KB // 8
    dk = tl.arange(0, DK)
    out = ()
    for f in tl.static_range(8 // KB):
        scale, zero = tl.load(header + f * DK + dk), tl.load(header + D + f * DK + dk)
        out = out + (grid(scale, zero, 255 // ((1 << KB) - 1), KB),)
    return out


@triton.jit
def key_codes(k, FIRST: tl.constexpr, grids, N: tl.constexpr, DK: tl.constexpr, KB: tl.constexpr):
    """Packed codes, int32 `[N, DK]` with the code bytes in the low bits, of pieces k under one grid per channel."""
    packed = tl.zeros([N, DK], tl.int32)
    for f in tl.static_range(8 // KB):
        less, zero, inverse, top = grids[f]
        x = k[FIRST + f].to(tl.float32)
        bits = code_bits(x, less[None, :], zero[None, :], inverse[None, :], top[None, :])
        packed += (bits - ROUNDER_BITS) << (KB * f)
    return packed


@triton.jit
def tier_keys(
    pages, out, row_table, ids, n_pages, n, order, header, like, page_bytes: tl.constexpr, D: tl.constexpr,
    SOURCE: tl.constexpr, TO: tl.constexpr, WHOLE: tl.constexpr, MOST: tl.constexpr,
):
    """Write the keys of one tier of one head: tokens order[0..n-1] of the source in `pages` (WHOLE: 0..n-1) to the
    pages ids[0..n_pages-1] of `out`, at most MOST slots at a time. Slots after n are zero.
    """
    KB: tl.constexpr = TO[KEY_BITS]
    T: tl.constexpr = TO[TOKENS]
    DK: tl.constexpr = D * KB // 8
    N: tl.constexpr = min(padded(TO[TOKENS]), MOST)
    PARTS: tl.constexpr = (T + N - 1) // N
    dk = tl.arange(0, DK)
    grids = channel_grids(header, D, KB)
    for c in range(0, n_pages * PARTS):
        i = c % PARTS * N + tl.arange(0, N)
        in_page = i < T
        token = c // PARTS * T + i
        valid = in_page & (token < n)
        if not WHOLE:
            token = tl.load(order + token, mask=valid, other=0).to(tl.int32)
        _, rows = source_rows(pages, row_table, token, valid, like, page_bytes, D, SOURCE[TOKENS])
        page = out + tl.load(ids + c // PARTS).to(tl.int64) * page_bytes
        k = load_rows(rows, valid, D, DK)
        packed = tl.where(valid[:, None], key_codes(k, 0, grids, N, DK, KB), 0)
        tl.store(page + i[:, None] * DK + dk[None, :], packed.to(tl.uint8), mask=in_page[:, None])


@triton.jit
def tier_values(
    pages, out, row_table, ids, n_pages, n, order, like, page_bytes: tl.constexpr, D: tl.constexpr,
    SOURCE: tl.constexpr, TO: tl.constexpr, SCORED: tl.constexpr, WHOLE: tl.constexpr, MOST: tl.constexpr,
):
    """Write everything but the keys of the same pages, with zeros in their slack."""
    VB: tl.constexpr = TO[VALUE_BITS]
    T: tl.constexpr = TO[TOKENS]
    DV: tl.constexpr = D * VB // 8
    W: tl.constexpr = 32 if VB == 2 and DV > 32 else DV
    N: tl.constexpr = min(padded(TO[TOKENS]), MOST)
    PARTS: tl.constexpr = (T + N - 1) // N
    for c in range(0, n_pages * PARTS):
        page = out + tl.load(ids + c // PARTS).to(tl.int64) * page_bytes
        first = c // PARTS * T
        i = c % PARTS * (N // 4) + tl.arange(0, N // 4)
        v = load_runs(
            pages, row_table, order, first, i, 4 * i < T, n, like, page_bytes, D, SOURCE[TOKENS],
            SOURCE[VALUE_CODES] // 2, W, WHOLE
        )
        write_values(page, i, 4 * i < T, v, N // 4, W, D, VB, T, TO[VALUE_CODES], TO[VALUE_META], 4)
        if SCORED:
            i = c % PARTS * N + tl.arange(0, N)
            token = first + i
            valid = (i < T) & (token < n)
            if not WHOLE:
                token = tl.load(order + token, mask=valid, other=0).to(tl.int32)
            base, _ = source_rows(pages, row_table, token, valid, like, page_bytes, D, SOURCE[TOKENS])
            at = (base + SOURCE[SCORES]).to(tl.pointer_type(tl.float32)) + token % SOURCE[TOKENS]
            score = tl.load(at, mask=valid, other=0.0)
            write_evidence(page, i, i < T, valid, score, token, TO[SCORES], TO[POSITIONS])
        if TO[USED_BYTES] < page_bytes:
            clear_slack(page, TO[USED_BYTES], page_bytes, padded(page_bytes - TO[USED_BYTES]))


@triton.jit
def header_rows(
    pages, row_table, at, n, order, like, page_bytes: tl.constexpr, D: tl.constexpr, T0: tl.constexpr,
    WHOLE: tl.constexpr, STEP: tl.constexpr,
):
    """Keys `[STEP, D]` of kept tokens from `at` on. The last token repeats, which changes no range; zeros if there is
    none.
    """
    token = tl.minimum(at + tl.arange(0, STEP), n - 1)
    live = token >= 0
    if not WHOLE:
        token = tl.load(order + token, mask=live, other=0).to(tl.int32)
    _, rows = source_rows(pages, row_table, token, live, like, page_bytes, D, T0)
    return tl.load(rows[:, None] + tl.arange(0, D)[None, :], mask=live[:, None], other=0.0)


@triton.jit
def write_header(
    pages, row_table, n, order, header, like, page_bytes: tl.constexpr, D: tl.constexpr, T0: tl.constexpr,
    WHOLE: tl.constexpr, STEP: tl.constexpr,
):
    """Write scale (on the 8-bit grid) and zero of each channel over the kept tokens."""
    d = tl.arange(0, D)
    lo = header_rows(pages, row_table, 0, n, order, like, page_bytes, D, T0, WHOLE, STEP)
    hi = lo
    for at in range(STEP, n, STEP):
        k = header_rows(pages, row_table, at, n, order, like, page_bytes, D, T0, WHOLE, STEP)
        lo = lesser(lo, k)
        hi = greater(hi, k)
    scale, zero = half_range(tl.min(lo.to(tl.float32), 0), tl.max(hi.to(tl.float32), 0), 255)
    tl.store(header + d, scale)
    tl.store(header + D + d, zero)
    tl.debug_barrier()


@triton.jit
def whole_keys(
    pages, row_table, ids, header, like, page_bytes: tl.constexpr, D: tl.constexpr, P: tl.constexpr, PP: tl.constexpr,
    SOURCE: tl.constexpr, TO: tl.constexpr,
):
    """Write header and keys of a head that keeps all tokens in one tier. Rows are read once and stay in registers."""
    KB: tl.constexpr = TO[KEY_BITS]
    T: tl.constexpr = TO[TOKENS]
    DK: tl.constexpr = D * KB // 8
    REST: tl.constexpr = (P + T - 1) // T * T - P
    N: tl.constexpr = PP // 4
    i = tl.arange(0, N)
    live = 4 * i < P
    k = load_runs(pages, row_table, header, 0, i, live, P, like, page_bytes, D, SOURCE[TOKENS], 0, DK, True)
    # Four bytes per thread: the grids of more channels exceed its registers.
    dk = tl.max_contiguous(tl.arange(0, DK), 4)
    grids = ()
    for f in tl.static_range(8 // KB):
        lo = k[f]
        hi = lo
        for u in tl.static_range(1, 4):
            lo = lesser(lo, k[u * (8 // KB) + f])
            hi = greater(hi, k[u * (8 // KB) + f])
        live_lo = tl.where(live[:, None], lo.to(tl.float32), float("inf"))
        live_hi = tl.where(live[:, None], hi.to(tl.float32), float("-inf"))
        scale, zero = half_range(tl.min(live_lo, 0), tl.max(live_hi, 0), 255)
        tl.store(header + f * DK + dk, scale)
        tl.store(header + D + f * DK + dk, zero)
        grids = grids + (grid(scale, zero, 255 // ((1 << KB) - 1), KB),)
    page = pages + tl.load(ids + 4 * i // T, mask=live, other=0).to(tl.int64) * page_bytes
    for u in tl.static_range(4):
        packed = key_codes(k, u * (8 // KB), grids, N, DK, KB)
        at = page + (4 * i % T + u) * DK
        tl.store(at[:, None] + dk[None, :], packed.to(tl.uint8), mask=live[:, None])
    if REST > 0:
        last = pages + tl.load(ids + P // T).to(tl.int64) * page_bytes + P % T * DK
        clear_slack(last, 0, REST * DK, padded(REST * DK))


@triton.jit
def pack_kernel(
    pages, row_table, ids, page_counts, blocks, tiers, order, headers, like,
    LH: tl.constexpr, E: tl.constexpr, D: tl.constexpr, P: tl.constexpr, PP: tl.constexpr,
    page_bytes: tl.constexpr, SOURCE: tl.constexpr, HIGH: tl.constexpr, LOW: tl.constexpr,
    SCORED: tl.constexpr, WHOLE: tl.constexpr, HOLD: tl.constexpr,
):
    """grid (2 m,): rows are (block, layer, head), one program for keys and one for values. row_table int32 `[m, E]`
    source pages, ids int32 `[m, E]` destination pages (high, then low), page_counts int64 `[2, m]`, blocks `[n]`,
    tiers int8 `[m, P]`, order int16 `[m, P]` scratch, headers fp16 `[blocks, LH, 2, D]`. SOURCE (bf16), HIGH, LOW:
    `FormatClass` records; LOW is empty without a low tier. WHOLE: every token is kept high; tiers and order are not
    read. HOLD: keys fit in registers.
    """
    row = (tl.program_id(0) // 2).to(tl.int64)
    of_keys = tl.program_id(0) % 2 == 0
    row_table += row * E
    ids += row * E
    n_high = P
    n = P
    if WHOLE:
        pages_high = (P + HIGH[TOKENS] - 1) // HIGH[TOKENS]
    else:
        pages_high = tl.load(page_counts + row).to(tl.int32)
        t = tl.arange(0, PP)
        tier = tl.load(tiers + row * P + t, mask=t < P, other=0)
        order += row * P
        high = (tier == 2).to(tl.int32)
        n_high = tl.sum(high, 0)
        tl.store(order + tl.cumsum(high, 0) - 1, t.to(tl.int16), mask=high == 1)
        n = n_high
        if len(LOW) > 0:
            low = (tier == 1).to(tl.int32)
            n += tl.sum(low, 0)
            tl.store(order + n_high + tl.cumsum(low, 0) - 1, t.to(tl.int16), mask=low == 1)
        tl.debug_barrier()
    header = headers + (tl.load(blocks + row // LH).to(tl.int64) * LH + row % LH) * (2 * D)
    if of_keys:
        if WHOLE and HOLD:
            whole_keys(pages, row_table, ids, header, like, page_bytes, D, P, PP, SOURCE, HIGH)
        else:
            write_header(pages, row_table, n, order, header, like, page_bytes, D, SOURCE[TOKENS], WHOLE, 32)
            tier_keys(
                pages, pages, row_table, ids, pages_high, n_high, order, header, like, page_bytes, D, SOURCE, HIGH,
                WHOLE, 64,
            )  # fmt: skip
    else:
        tier_values(
            pages, pages, row_table, ids, pages_high, n_high, order, like, page_bytes, D, SOURCE, HIGH, SCORED, WHOLE,
            64,
        )  # fmt: skip
    if len(LOW) > 0 and not WHOLE:
        pages_low = tl.load(page_counts + tl.num_programs(0) // 2 + row).to(tl.int32)
        if of_keys:
            tier_keys(
                pages, pages, row_table, ids + pages_high, pages_low, n - n_high, order + n_high, header, like,
                page_bytes, D, SOURCE, LOW, WHOLE, 64,
            )  # fmt: skip
        else:
            tier_values(
                pages, pages, row_table, ids + pages_high, pages_low, n - n_high, order + n_high, like, page_bytes, D,
                SOURCE, LOW, SCORED, WHOLE, 64,
            )  # fmt: skip
