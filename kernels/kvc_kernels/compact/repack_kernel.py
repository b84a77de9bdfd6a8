"""Repacking of packed heads: key codes to codes, values quantized again if their bits change.

Two kernels enclose the exchange of pages: `order_kernel` maps stored tokens to destinations, `repack_kernel` moves
them. The bytes are those of `reference._move`: integer arithmetic for keys, and for values the same fp32 operations
with separate product and sum (the launch disables fused multiply-add).
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
from .write_kernel import clear_slack, padded, write_evidence, write_values


@triton.jit
def _place_tokens(
    where, pages, row_table, n, first, page_bytes: tl.constexpr, E: tl.constexpr, P: tl.constexpr, PP: tl.constexpr,
    T: tl.constexpr, POFF: tl.constexpr, SIDE: tl.constexpr, SCORED: tl.constexpr,
):
    """Write where[token] = slot of this tier (plus 0x4000 in the low tier). Unscored pages hold tokens first, first +
    1, ...
    """
    i = tl.arange(0, PP)
    stored = i < n
    token = first + i
    if SCORED:
        entry = i // T if SIDE == 0 else E - 1 - i // T
        page = tl.load(row_table + entry, mask=stored, other=0).to(tl.int64)
        at = (pages + page * page_bytes + POFF).to(tl.pointer_type(tl.int16)) + i % T
        token = tl.load(at, mask=stored, other=0).to(tl.int32)
    tl.store(where + token, (i + SIDE * 0x4000).to(tl.int16), mask=stored & (token < P))


@triton.jit
def order_kernel(
    pages, row_table, row_counts, tiers, where, order, counts,
    E: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, page_bytes: tl.constexpr, SOURCE: tl.constexpr,
    TWO_TIERS: tl.constexpr, SCORED: tl.constexpr,
):
    """grid (m,). where int16 `[m, P]`: slot of each token or -1; order int16 `[m, P]`: tokens kept high, then low;
    counts int32 `[m, 2]`: their numbers. tiers int8 `[m, P]`, row_counts int16 `[m, 2]` of the source.
    """
    row = tl.program_id(0).to(tl.int64)
    t = tl.arange(0, PP)
    where += row * P
    order += row * P
    row_table += row * E
    tl.store(where + t, tl.full([PP], -1, tl.int16), mask=t < P)
    tl.debug_barrier()
    n_high = tl.load(row_counts + row * 2).to(tl.int32)
    _place_tokens(
        where, pages, row_table, n_high, 0, page_bytes, E, P, PP, SOURCE[0][TOKENS], SOURCE[0][POSITIONS], 0, SCORED
    )
    if len(SOURCE) > 1:
        n_low = tl.load(row_counts + row * 2 + 1).to(tl.int32)
        _place_tokens(
            where, pages, row_table, n_low, n_high, page_bytes, E, P, PP, SOURCE[1][TOKENS], SOURCE[1][POSITIONS], 1,
            SCORED
        )
    tl.debug_barrier()
    stored = tl.load(where + t, mask=t < P, other=-1) >= 0
    tier = tl.load(tiers + row * P + t, mask=t < P, other=0)
    high = (stored & (tier == 2)).to(tl.int32)
    kept = tl.sum(high, 0)
    tl.store(order + tl.cumsum(high, 0) - 1, t.to(tl.int16), mask=high == 1)
    tl.store(counts + row * 2, kept)
    if TWO_TIERS:
        low = (stored & (tier == 1)).to(tl.int32)
        tl.store(order + kept + tl.cumsum(low, 0) - 1, t.to(tl.int16), mask=low == 1)
        tl.store(counts + row * 2 + 1, tl.sum(low, 0))
    else:
        tl.store(counts + row * 2 + 1, 0)


@triton.jit
def _convert(code, FROM: tl.constexpr, TO: tl.constexpr):
    """Key codes at another number of bits, down through 4 bits; see `quant.convert_codes`."""
    if FROM == 8 and TO < 8:
        code = (code + 8) // 17
    if FROM > 2 and TO == 2:
        code = (code + 2) // 5
    if FROM < TO:
        code = code * (((1 << TO) - 1) // ((1 << FROM) - 1))
    return code


@triton.jit
def _source_codes(at, first, width: tl.constexpr, STRIDE, D: tl.constexpr, BITS: tl.constexpr, mask):
    """int32 codes `[N, width]` of features first..first+width. `at` `[N]` points to byte 0 of a token's codes; STRIDE
    bytes lead to the next byte.
    """
    x = first + tl.arange(0, width)
    B: tl.constexpr = D * BITS // 8
    byte = tl.load(at[:, None] + (x % B * STRIDE)[None, :], mask=mask[:, None], other=0).to(tl.int32)
    return (byte >> (x // B * BITS)[None, :]) & ((1 << BITS) - 1)


@triton.jit
def _repack_tier(
    pages, row_table, ids, n_pages, n, order, where,
    page_bytes: tl.constexpr, D: tl.constexpr, E: tl.constexpr, SOURCE: tl.constexpr, TO: tl.constexpr,
    SCORED: tl.constexpr,
):
    """Write the pages of one tier of one head. Tokens come from both tiers of the source."""
    KB: tl.constexpr = TO[KEY_BITS]
    VB: tl.constexpr = TO[VALUE_BITS]
    T: tl.constexpr = TO[TOKENS]
    TP: tl.constexpr = padded(T)
    DK: tl.constexpr = D * KB // 8
    DV: tl.constexpr = D * VB // 8
    W: tl.constexpr = 32 if VB == 2 and DV > 32 else DV
    GROUPS: tl.constexpr = D // 32 if VB == 2 else 1
    i = tl.arange(0, TP)
    dk = tl.arange(0, DK)
    in_page = i < T
    for j in range(0, n_pages):
        valid = in_page & (j * T + i < n)
        token = tl.load(order + j * T + i, mask=valid, other=0).to(tl.int32)
        code = tl.load(where + token, mask=valid, other=0).to(tl.int32)
        page = pages + tl.load(ids + j).to(tl.int64) * page_bytes
        keys = tl.zeros([TP, DK], tl.int32)
        score = tl.zeros([TP], tl.float32)
        for a in tl.static_range(len(SOURCE)):
            from_tier = valid & (code // 0x4000 == a)
            base, slot = _source_slot(pages, row_table, code, from_tier, page_bytes, E, SOURCE[a][TOKENS], a)
            for f in tl.static_range(8 // KB):
                field = _source_codes(
                    base + slot * (D * SOURCE[a][KEY_BITS] // 8), f * DK, DK, 1, D, SOURCE[a][KEY_BITS], from_tier
                )
                field = tl.where(from_tier[:, None], _convert(field, SOURCE[a][KEY_BITS], KB), 0)
                keys |= field << (KB * f)
            if SCORED:
                at = (base + SOURCE[a][SCORES]).to(tl.pointer_type(tl.float32)) + slot
                score += tl.load(at, mask=from_tier, other=0.0)
        tl.store(page + i[:, None] * DK + dk[None, :], keys.to(tl.uint8), mask=in_page[:, None])
        for a in tl.static_range(len(SOURCE)):
            from_tier = valid & (code // 0x4000 == a)
            base, slot = _source_slot(pages, row_table, code, from_tier, page_bytes, E, SOURCE[a][TOKENS], a)
            # Slots of the other source tier are written in its turn, empty slots in the first turn, as zeros.
            turn = from_tier
            if a == 0:
                turn = in_page & (from_tier | ~valid)
            _move_values(
                page, base, slot, i, turn, from_tier, TP, D, W, GROUPS, VB, T, TO[VALUE_CODES], TO[VALUE_META],
                SOURCE[a][VALUE_BITS], SOURCE[a][TOKENS], SOURCE[a][VALUE_CODES], SOURCE[a][VALUE_META],
            )  # fmt: skip
        if SCORED:
            write_evidence(page, i, in_page, valid, score, token, TO[SCORES], TO[POSITIONS])
        if TO[USED_BYTES] < page_bytes:
            clear_slack(page, TO[USED_BYTES], page_bytes, padded(page_bytes - TO[USED_BYTES]))


@triton.jit
def _source_slot(
    pages, row_table, code, valid, page_bytes: tl.constexpr, E: tl.constexpr, T: tl.constexpr, SIDE: tl.constexpr
):
    """Page base `[N]` and slot `[N]` of tokens at `code` in tier SIDE of the source."""
    index = code % 0x4000
    entry = index // T if SIDE == 0 else E - 1 - index // T
    page = tl.load(row_table + entry, mask=valid, other=0).to(tl.int64)
    return pages + page * page_bytes, index % T


@triton.jit
def _move_values(
    page, base, slot, i, turn, valid, N: tl.constexpr, D: tl.constexpr, W: tl.constexpr, GROUPS: tl.constexpr,
    VB: tl.constexpr, T: tl.constexpr, VOFF: tl.constexpr, VMETA: tl.constexpr, SVB: tl.constexpr, ST: tl.constexpr,
    SVOFF: tl.constexpr, SVMETA: tl.constexpr,
):
    """Write the values of one source tier (SVB bits, ST tokens per page) to slots i: tokens where `valid`, zeros
    elsewhere, in the slots where `turn` is set.
    """
    DV: tl.constexpr = D * VB // 8
    SGROUPS: tl.constexpr = D // 32 if SVB == 2 else 1
    w = tl.arange(0, W)
    codes = base + SVOFF + slot
    meta = (base + SVMETA).to(tl.pointer_type(tl.float16)) + slot
    if SVB == VB:
        for r in tl.static_range(DV // W):
            x = tl.load(codes[:, None] + ((r * W + w) * ST)[None, :], mask=valid[:, None], other=0)
            tl.store(page + VOFF + (r * W + w)[None, :] * T + i[:, None], x, mask=turn[:, None])
        to = (page + VMETA).to(tl.pointer_type(tl.float16)) + i
        for g in tl.static_range(2 * GROUPS):
            tl.store(to + g * T, tl.load(meta + g * ST, mask=valid, other=0.0), mask=turn)
    else:
        v = ()
        for p in tl.static_range(D // W):
            x = _source_codes(codes, p * W, W, ST, D, SVB, valid).to(tl.float32)
            group = (p * W + w) * SGROUPS // D * (2 * ST)
            s = tl.load(meta[:, None] + group[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
            z = tl.load(meta[:, None] + (group + ST)[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
            v = v + (x * s + z,)
        write_values(page, i, turn, v, N, W, D, VB, T, VOFF, VMETA, 1)


@triton.jit
def repack_kernel(
    pages, row_table, ids, page_counts, counts, where, order,
    E: tl.constexpr, D: tl.constexpr, P: tl.constexpr, page_bytes: tl.constexpr, SOURCE: tl.constexpr,
    HIGH: tl.constexpr, LOW: tl.constexpr, SCORED: tl.constexpr,
):
    """grid (m,): like `pack_kernel`, from the tiers of SOURCE (a tuple of one or two `FormatClass` records)."""
    row = tl.program_id(0).to(tl.int64)
    row_table += row * E
    ids += row * E
    where += row * P
    order += row * P
    pages_high = tl.load(page_counts + row).to(tl.int32)
    n_high = tl.load(counts + row * 2)
    _repack_tier(
        pages, row_table, ids, pages_high, n_high, order, where, page_bytes, D, E, SOURCE, HIGH, SCORED
    )
    if len(LOW) > 0:
        pages_low = tl.load(page_counts + tl.num_programs(0) + row).to(tl.int32)
        _repack_tier(
            pages, row_table, ids + pages_high, pages_low, tl.load(counts + row * 2 + 1), order + n_high, where,
            page_bytes, D, E, SOURCE, LOW, SCORED,
        )  # fmt: skip
