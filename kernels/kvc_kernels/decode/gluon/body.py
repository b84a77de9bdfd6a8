"""Tile loops of the Gluon decode kernel. `tiles.py` explains layouts and orders."""

# ruff: noqa: RUF005  (the compiler knows no unpacking inside tuples)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from ...common.unpack_kernel import CODE_UNIT, LOG2E, NEG
from .. import planner
from ..body_kernel import P_SHIFT
from .queue import (
    ONES,
    WORD,
    copy_keys,
    copy_value_meta,
    copy_values,
    first_token,
    join_rows,
    keys_queue_layout,
    mask_value_meta,
    read_header,
    read_keys,
    read_scales,
    read_values,
    read_zeros,
    run_pointer,
    values_queue_layout,
)
from .tiles import (
    A_OP,
    B_OP,
    COLUMN,
    LANE,
    MMA,
    ROW,
    crumbs,
    feature_column,
    feature_rows,
    header_rows_layout,
    hidden_zero,
    key_layout,
    key_operand,
    meta_layout,
    meta_operand,
    nested,
    pairs,
    plain_value_layout,
    plain_value_operand,
    token_weights,
    transpose_p,
    value_operand,
)

CHUNK = gl.constexpr(planner.CHUNK)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def list_tiles(
    words, tile_pages, entries, n, counts, counts_stride, table, table_stride,
    TILE: gl.constexpr, T: gl.constexpr, STEP: gl.constexpr, FROM_LIST: gl.constexpr, UNROLL: gl.constexpr,
):  # fmt: skip
    """List the tiles of `n` <= CHUNK blocks for the tile loop, one block per lane; return the number of tiles.

    `entries` int64 `[n]`: block << 32 | tokens (the latter for bf16 blocks; packed ones have `counts`). `table` points
    to the first entry of this layer and head, which run by STEP (+1: high pages from the left, -1: low from the right).
    words int64 `[tiles + 2]`: block << 32 | j << 24 | first token << 12 | tokens of the block; j: place in the chunk.
    tile_pages int32 `[tiles + 2, 4]`: page of each run of TILE / 4 tokens. Two tiles of page 0 end the lists, because
    the loop reads ahead. Page 0 also backs everything after a block's tokens: uncompressed rows are loaded from there
    without a mask, packed runs are not copied (`run_is_live`).
    """
    j = gl.arange(0, CHUNK, layout=LANE) + hidden_zero(n)
    e = gl.load(entries + j, mask=j < n, other=0)
    if FROM_LIST:
        count = (e & 0xFFFFFFFF).to(gl.int32)
    else:
        count = gl.load(counts + (e >> 32) * counts_stride, mask=j < n, other=0).to(gl.int32)
    tiles = gl.where(j < n, (count + TILE - 1) // TILE, 0)
    at = gl.associative_scan(tiles, 0, _add) - tiles
    total = gl.sum(tiles, 0)
    head = ((e >> 32) << 32) | (j.to(gl.int64) << 24) | count.to(gl.int64)
    row = table + (e >> 32) * table_stride
    for start in range(0, gl.max(tiles, 0), UNROLL):
        for u in gl.static_range(UNROLL):
            i = start + u
            used = i < tiles
            gl.store(words + at + i, head | (gl.to_tensor(i).to(gl.int64) * TILE << 12), mask=used)
            if T % TILE == 0:
                page = gl.load(row + STEP * (i * TILE // T), mask=used, other=0)
                for k in gl.static_range(4):
                    live = i * TILE + k * (TILE // 4) < count
                    gl.store(tile_pages + (at + i) * 4 + k, gl.where(live, page, 0), mask=used)
            else:
                for k in gl.static_range(4):
                    t = i * TILE + k * (TILE // 4)
                    page = gl.load(row + STEP * (t // T), mask=t < count, other=0)
                    gl.store(tile_pages + (at + i) * 4 + k, page, mask=used)
    gl.store(words + total + j, gl.zeros([CHUNK], gl.int64, layout=LANE), mask=j < 2)
    gl.store(tile_pages + total * 4 + j, gl.zeros([CHUNK], gl.int32, layout=LANE), mask=j < 8)
    return total


@gluon.jit
def zero_products(
    qz, q, zeros, header_stride, entries, n, factor, DK: gl.constexpr, NQ: gl.constexpr, KB: gl.constexpr
):
    """qz fp32 `[CHUNK, NQ]` = factor * q . zero of each block's header, by a small MMA whose rows are the blocks."""
    NF: gl.constexpr = 8 // KB
    ROWS: gl.constexpr = 16  # more would need more registers than the tile loop has
    layout: gl.constexpr = header_rows_layout(ROWS, DK)
    for first in range(0, n, ROWS):
        start = hidden_zero(n)
        j = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout)) + first
        word = gl.arange(0, DK // 2, layout=gl.SliceLayout(0, layout)) + start
        block = gl.load(entries + j, mask=j < n, other=0) >> 32
        s = gl.zeros([ROWS, NQ], gl.float32, layout=MMA)
        for k in gl.static_range(NF):
            at = (zeros + block * header_stride + (NF - 1 - k) * DK).to(gl.pointer_type(gl.int32), bitcast=True)
            zero = feature_rows(pairs(gl.load(at[:, None] + word[None, :])), ROWS, DK)
            part = mma_v2(zero, q[k], gl.zeros([ROWS, NQ], gl.float32, layout=MMA))
            s += part * (1 << (KB * (NF - 1 - k)))
        row = gl.arange(0, ROWS, layout=ROW) + first
        column = gl.arange(0, NQ, layout=COLUMN) + start
        gl.store(qz + row[:, None] * NQ + column[None, :], s * factor)


@gluon.jit
def _live(word):
    """Number of tokens of the block from the tile's first token on."""
    return (word & 0xFFF).to(gl.int32) - first_token(word)


@gluon.jit
def _capped(x, cap):
    """cap * tanh(x / cap) through exp2; exact to fp32 rounding at both ends."""
    return cap * (1.0 - 2.0 / (gl.exp2(x * (2.0 * LOG2E / cap)) + 1.0))


@gluon.jit
def packed_part(
    acc, zacc, m, q, words, tile_pages, qz_scratch, queue, n_tiles, pages, page_bytes, headers, header_stride,
    scale, cap, D: gl.constexpr, NQ: gl.constexpr, KB: gl.constexpr, VB: gl.constexpr, T: gl.constexpr,
    VOFF: gl.constexpr, VMETA: gl.constexpr, CAPPED: gl.constexpr,
    TILE: gl.constexpr,
):  # fmt: skip
    """Add `n_tiles` tiles of packed tokens to the running softmax.

    acc: fp32 `[rows, NQ]` per row part and tensor of `nested` or `crumbs`, in units of 2^-24; rows = D*VB/8, or 32 (one
    value group) if VB is 2. zacc fp32 `[16, NQ]`: row g is the sum of p * zero of value group g, row GROUPS the sum of
    p. m fp32 `[NQ]`. q: fp16 `[D*KB/8, NQ]` B operands per field, highest first, holding q * 2^(-KB*field). queue: from
    `make_queue`, empty before and after.

    Copies run ahead of their use: the copy of the next tile's keys starts when this tile's keys are in registers.
    Values do the same, and page ids are loaded one tile earlier.
    """
    DK: gl.constexpr = D * KB // 8
    DV: gl.constexpr = D * VB // 8
    NKF: gl.constexpr = 8 // KB
    NVF: gl.constexpr = 8 // VB
    W: gl.constexpr = TILE // 4
    ROWS: gl.constexpr = DV if VB > 2 or DV < 32 else 32
    PARTS: gl.constexpr = DV // ROWS
    KEY_PARTS: gl.constexpr = 2 if TILE > 16 else 1  # unpacking all keys at once takes too many registers
    GROUPS: gl.constexpr = D // 32 if VB == 2 else 1
    ROW_GROUP: gl.constexpr = D if VB > 2 else 32
    LK: gl.constexpr = keys_queue_layout(TILE, DK)
    LV: gl.constexpr = values_queue_layout(TILE, DV)
    LM: gl.constexpr = meta_layout(TILE)
    k_run = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LK))))
    v_run = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LV))))
    m_group = gl.arange(0, 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, LM)))
    blank = gl.zeros([8, 4, W // 2], gl.int32, layout=LM)
    eighth = gl.where((m_group + 8 == GROUPS)[:, None, None], ONES, blank)
    column = gl.arange(0, NQ, layout=COLUMN)
    place = gl.arange(0, TILE, layout=ROW)
    # The token's place in its lane's run. It is compared with 2 * (place >> 3), a constant of each register.
    lane_token = (place & 1) + ((place >> 1) & 3) * W
    c = scale * (LOG2E * CODE_UNIT)
    c = c * (255 // ((1 << KB) - 1))
    if CAPPED:
        c = c / LOG2E

    start = hidden_zero(n_tiles)
    words += start
    tile_pages += start
    qz_scratch += start
    word = gl.load(words)
    copy_keys(
        queue, pages, gl.load(tile_pages + k_run), page_bytes, word, headers, header_stride,
        D, KB, T, TILE,
    )  # fmt: skip
    v_ids = gl.load(tile_pages + v_run)
    copy_values(queue, pages, v_ids, page_bytes, word, D, VB, T, VOFF, TILE)
    copy_value_meta(queue, pages, v_ids, page_bytes, word, D, VB, GROUPS, T, VMETA, TILE)
    qz = gl.load(qz_scratch + ((word >> 24) & 0xFF) * NQ + column)
    next_word = gl.load(words + 1)
    next_k_ids = gl.load(tile_pages + 4 + k_run)
    next_v_ids = gl.load(tile_pages + 4 + v_run)
    for i in range(n_tiles):
        live = _live(word)
        word = next_word
        async_copy.wait_group(1)
        # Scaled queries per field. A `nested` field takes the difference to the field before.
        operands = ()
        above = gl.zeros([DK, NQ], gl.float16, layout=B_OP)
        for k in gl.static_range(NKF):
            scaled = q[k] * feature_column(pairs(read_header(queue, NKF - 1 - k, DK)), DK)[:, None]
            operands = operands + (scaled if k == 0 else scaled - above,)
            above = scaled
        rows = ()
        for part in gl.static_range(KEY_PARTS):
            fields = nested(read_keys(queue, part, KEY_PARTS, TILE, DK), KB)
            s = gl.zeros([TILE // KEY_PARTS, NQ], gl.float32, layout=MMA)
            for k in gl.static_range(NKF):
                s = mma_v2(key_operand(fields[k], TILE // KEY_PARTS, DK), operands[k], s)
            rows = rows + (s,)
        s = join_rows(rows, TILE, NQ)
        copy_keys(
            queue, pages, next_k_ids, page_bytes, word, headers, header_stride, D, KB, T, TILE
        )
        if CAPPED:
            s = _capped(s * c + qz[None, :], cap) * LOG2E
        zero_part = qz
        qz = gl.load(qz_scratch + ((word >> 24) & 0xFF) * NQ + column)
        if live < TILE:
            s = gl.where((2 * (place >> 3) < live - lane_token)[:, None], s, NEG)
        if CAPPED:
            top = gl.maximum(m, gl.max(s, 0))
            p = gl.exp2(s - (top - P_SHIFT)[None, :])
        else:
            # The maximum of the raw products is sufficient (c > 0): one FMA per element serves scale, zero and maximum.
            top = gl.maximum(m, gl.max(s, 0) * c + zero_part)
            p = gl.exp2(s * c + (zero_part - top + P_SHIFT)[None, :])
        keep = gl.exp2(m - top)[None, :]
        m = top
        p = transpose_p(p, TILE, NQ, gl.float16)

        async_copy.wait_group(1)
        if live < TILE:
            # Bytes after a block's tokens may be NaN, which 0 * p does not remove.
            mask_value_meta(queue, live, GROUPS, TILE)
        values = ()
        for r in gl.static_range(PARTS):
            values = values + (read_values(queue, TILE, r * ROWS, ROWS),)
        zacc = mma_v2(meta_operand(read_zeros(queue, TILE), eighth, TILE), p, zacc * keep)
        copy_values(queue, pages, next_v_ids, page_bytes, word, D, VB, T, VOFF, TILE)
        acc_next = ()
        for r in gl.static_range(PARTS):
            fields = crumbs(values[r]) if VB == 2 else nested(values[r], VB)
            for f in gl.static_range(NVF):
                weight = read_scales(queue, (f * DV + r * ROWS) // ROW_GROUP, TILE)
                weight = p * token_weights(weight, TILE)[:, None]
                acc_next = acc_next + (mma_v2(value_operand(fields[f], ROWS, TILE), weight, acc[r * NVF + f] * keep),)
        acc = acc_next
        copy_value_meta(queue, pages, next_v_ids, page_bytes, word, D, VB, GROUPS, T, VMETA, TILE)
        next_word = gl.load(words + i + 2)
        next_k_ids = gl.load(tile_pages + (i + 2) * 4 + k_run)
        next_v_ids = gl.load(tile_pages + (i + 2) * 4 + v_run)
    async_copy.wait_group(0)  # copies of the page-0 tiles after the last tile
    return acc, zacc, m


@gluon.jit
def plain_part(
    acc, lacc, m, q, words, tile_pages, n_tiles, pages, page_bytes, scale, cap,
    D: gl.constexpr, NQ: gl.constexpr, T: gl.constexpr, VOFF: gl.constexpr, CAPPED: gl.constexpr,
    TILE: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """Add `n_tiles` tiles of uncompressed tokens. acc fp32 `[D, NQ]`, rows as in `plain_value_operand`; lacc fp32
    `[16, NQ]`, every row the sum of p; q B operand `[D, NQ]` in the model's dtype."""
    W: gl.constexpr = TILE // 4
    LK: gl.constexpr = key_layout(TILE, D * 2)
    LV: gl.constexpr = plain_value_layout(TILE, D)
    k_run = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, LK)))
    v_run = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, LV)))
    k_token = gl.arange(0, W, layout=gl.SliceLayout(0, gl.SliceLayout(2, LK)))
    k_word = gl.arange(0, D // 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, LK)))
    v_token = gl.arange(0, W, layout=gl.SliceLayout(0, gl.SliceLayout(2, LV)))
    v_word = gl.arange(0, D // 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, LV)))
    k_at = (k_token * (D // 2))[None, :, None] + k_word[None, None, :]
    v_at = (v_token * (D // 2))[None, :, None] + v_word[None, None, :]
    place = gl.arange(0, TILE, layout=ROW)
    lane_token = (place & 1) + ((place >> 1) & 3) * W
    ones = gl.full([16, TILE], 1.0, dtype, layout=A_OP)
    c = scale * LOG2E

    start = hidden_zero(n_tiles)
    words += start
    tile_pages += start
    word = gl.load(words)
    k_base, k_slot = run_pointer(pages, gl.load(tile_pages + k_run), page_bytes, first_token(word), k_run, TILE, T)
    v_ids = gl.load(tile_pages + v_run)
    keys = gl.load((k_base + k_slot * (2 * D)).to(WORD, bitcast=True)[:, None, None] + k_at)
    next_word = gl.load(words + 1)
    next_k_ids = gl.load(tile_pages + 4 + k_run)
    next_v_ids = gl.load(tile_pages + 4 + v_run)
    for i in range(n_tiles):
        live = _live(word)
        v_base, v_slot = run_pointer(pages, v_ids, page_bytes, first_token(word), v_run, TILE, T)
        values = gl.load((v_base + (VOFF + v_slot * (2 * D))).to(WORD, bitcast=True)[:, None, None] + v_at)
        s = gl.zeros([TILE, NQ], gl.float32, layout=MMA)
        s = mma_v2(key_operand(pairs(keys, dtype), TILE, D, True), q, s)

        word = next_word
        k_base, k_slot = run_pointer(pages, next_k_ids, page_bytes, first_token(word), k_run, TILE, T)
        v_ids = next_v_ids
        next_word = gl.load(words + i + 2)
        next_k_ids = gl.load(tile_pages + (i + 2) * 4 + k_run)
        next_v_ids = gl.load(tile_pages + (i + 2) * 4 + v_run)

        if CAPPED:
            s = _capped(s * scale, cap) * LOG2E
        else:
            s = s * c
        if live < TILE:
            # Bytes after a block's tokens may be NaN, which 0 * p does not remove.
            s = gl.where((2 * (place >> 3) < live - lane_token)[:, None], s, NEG)
            values = gl.where((v_token[None, :, None] < (live - v_run * W)[:, None, None]), values, 0)
        top = gl.maximum(m, gl.max(s, 0))
        p = gl.exp2(s - (top - P_SHIFT)[None, :])
        keep = gl.exp2(m - top)[None, :]
        m = top
        p = transpose_p(p, TILE, NQ, dtype)
        lacc = mma_v2(ones, p, lacc * keep)
        keys = gl.load((k_base + k_slot * (2 * D)).to(WORD, bitcast=True)[:, None, None] + k_at)
        acc = mma_v2(plain_value_operand(values, D, TILE, dtype), p, acc * keep)
    return acc, lacc, m
