"""The tile loops of the Gluon decode kernel; layouts and orders are explained in `decode_tiles_gluon_triton`."""

# ruff: noqa: RUF005  (the compiler knows no unpacking inside tuples)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from .decode_tiles_gluon_triton import (
    A_OP,
    B_OP,
    COLUMN,
    LANE,
    MMA,
    ROW,
    crumbs,
    feature_column,
    feature_rows,
    header_layout,
    header_rows_layout,
    key_layout,
    key_operand,
    meta_layout,
    meta_operand,
    nested,
    pairs,
    plain_value_layout,
    plain_value_operand,
    token_layout,
    token_weights,
    transpose_p,
    value_layout,
    value_operand,
)

CODE_UNIT = gl.constexpr(16777216.0)  # a code c is taken as the fp16 subnormal c * 2^-24
P_SHIFT = gl.constexpr(5.0)  # p is kept times 2^5, so that p * value_scale stays clear of fp16 subnormals
LOG2E = gl.constexpr(1.4426950408889634)
NEG = gl.constexpr(-1.0e30)
ONES = gl.constexpr(0x3C003C00)  # two fp16 ones
CHUNK = gl.constexpr(32)  # blocks whose tiles a program lists at a time, one a lane


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def list_tiles(
    words, tile_pages, entries, n, counts, counts_stride, table, table_stride,
    TILE: gl.constexpr, T: gl.constexpr, STEP: gl.constexpr, FROM_LIST: gl.constexpr, UNROLL: gl.constexpr,
):  # fmt: skip
    """Write what the tile loop needs to know of `n` <= CHUNK blocks, a block a lane; return the number of tiles.

    `entries` int64 `[n]`: block << 32 | tokens (the latter for bf16 blocks; packed ones have `counts`). `table` points
    to the first entry of this layer and head, which run by STEP (+1: high pages from the left, -1: low from the right).
    words int64 `[tiles + 2]`: block << 32 | j << 24 | first token << 12 | tokens of the block; j: place in the chunk.
    tile_pages int32 `[tiles + 2, 4]`: page of each run of TILE / 4 tokens. Two tiles of page 0 end the lists, for the
    loop reads ahead, and page 0 backs what lies behind a block's tokens, so that no load needs a mask.
    """
    j = gl.arange(0, CHUNK, layout=LANE)
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
    layout: gl.constexpr = header_rows_layout(CHUNK, DK)
    j = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, layout))
    word = gl.arange(0, DK // 2, layout=gl.SliceLayout(0, layout))
    block = gl.load(entries + j, mask=j < n, other=0) >> 32
    s = gl.zeros([CHUNK, NQ], gl.float32, layout=MMA)
    for k in gl.static_range(NF):
        at = (zeros + block * header_stride + (NF - 1 - k) * DK).to(gl.pointer_type(gl.int32), bitcast=True)
        zero = feature_rows(pairs(gl.load(at[:, None] + word[None, :])), CHUNK, DK)
        part = mma_v2(zero, q[k], gl.zeros([CHUNK, NQ], gl.float32, layout=MMA))
        s += part * (1 << (KB * (NF - 1 - k)))
    row = gl.arange(0, CHUNK, layout=ROW)
    column = gl.arange(0, NQ, layout=COLUMN)
    gl.store(qz + row[:, None] * NQ + column[None, :], s * factor)


@gluon.jit
def _first(word):
    return gl.multiple_of(((word >> 12) & 0xFFF).to(gl.int32), 16)


@gluon.jit
def _live(word):
    """Tokens of the block from the tile's first on."""
    return (word & 0xFFF).to(gl.int32) - _first(word)


@gluon.jit
def _run_pointer(pages, ids, page_bytes, first, run, TILE: gl.constexpr, T: gl.constexpr):
    """(page pointers, slots) `[4]` of the runs of TILE / 4 tokens that start at first + run * TILE / 4."""
    return pages + ids.to(gl.int64) * page_bytes, (first + run * (TILE // 4)) % T


@gluon.jit
def _pair_mask(token, live):
    """int32 mask of two fp16 that belong to tokens `token` and token + 1, of which `live` exist."""
    return gl.where(token + 1 < live, -1, gl.where(token < live, 0xFFFF, 0))


@gluon.jit
def _capped(x, cap):
    """cap * tanh(x / cap) through exp2; exact to fp32 rounding at both ends."""
    return cap * (1.0 - 2.0 / (gl.exp2(x * (2.0 * LOG2E / cap)) + 1.0))


@gluon.jit
def packed_part(
    acc, zacc, m, q, qsum, words, tile_pages, qz_scratch, n_tiles, pages, page_bytes, headers, header_stride,
    scale, cap, D: gl.constexpr, NQ: gl.constexpr, KB: gl.constexpr, VB: gl.constexpr, T: gl.constexpr,
    KMETA: gl.constexpr, VOFF: gl.constexpr, VMETA: gl.constexpr, TOKEN_KEYS: gl.constexpr, CAPPED: gl.constexpr,
    TILE: gl.constexpr,
):  # fmt: skip
    """Add `n_tiles` tiles of packed tokens to the running softmax.

    acc: fp32 `[rows, NQ]` per row part and tensor of `nested` or `crumbs`, in units of 2^-24; rows = D*VB/8, or 32 (one
    value group) if VB is 2. zacc fp32 `[16, NQ]`: row g is the sum of p * zero of value group g, row GROUPS that of p.
    m fp32 `[NQ]`. q: fp16 `[D*KB/8, NQ]` B operands per field, highest first, holding q * 2^(-KB*field) (with per-token
    keys the difference to the one before, as `nested` wants it).

    Loads run ahead of their use: keys and headers of the next tile start when this tile's keys are spent, its values
    when the tile begins, page ids a tile before that.
    """
    DK: gl.constexpr = D * KB // 8
    DV: gl.constexpr = D * VB // 8
    NKF: gl.constexpr = 8 // KB
    NVF: gl.constexpr = 8 // VB
    W: gl.constexpr = TILE // 4
    ROWS: gl.constexpr = DV if VB > 2 or DV < 32 else 32
    PARTS: gl.constexpr = DV // ROWS
    GROUPS: gl.constexpr = D // 32 if VB == 2 else 1
    ROW_GROUP: gl.constexpr = D if VB > 2 else 32
    LK: gl.constexpr = key_layout(TILE, DK)
    LV: gl.constexpr = value_layout(TILE, ROWS)
    LM: gl.constexpr = meta_layout(TILE)
    LT: gl.constexpr = token_layout(TILE)
    LH: gl.constexpr = header_layout(DK)
    WORD: gl.constexpr = gl.pointer_type(gl.int32)
    k_run = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, LK)))
    v_run = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, LV)))
    m_run = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, LM)))
    t_run = gl.arange(0, 4, layout=gl.SliceLayout(1, LT))
    k_token = gl.arange(0, W, layout=gl.SliceLayout(0, gl.SliceLayout(2, LK)))
    k_word = gl.arange(0, DK // 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, LK)))
    v_row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LV)))
    v_word = gl.arange(0, W // 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, LV)))
    m_group = gl.arange(0, 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, LM)))
    m_pair = gl.arange(0, W // 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, LM)))
    t_pair = gl.arange(0, W // 2, layout=gl.SliceLayout(0, LT))
    h_word = gl.arange(0, DK // 2, layout=LH)
    k_at = (k_token * (DK // 4))[None, :, None] + k_word[None, None, :]
    v_at = (v_row * (T // 4))[:, None, None] + v_word[None, None, :]
    m_at = gl.minimum(m_group, GROUPS - 1)[:, None, None] * T + m_pair[None, None, :]
    blank = gl.zeros([8, 4, W // 2], gl.int32, layout=LM)
    ones = gl.where((m_group == GROUPS)[:, None, None], ONES, blank)
    eighth = gl.where((m_group + 8 == GROUPS)[:, None, None], ONES, blank)
    column = gl.arange(0, NQ, layout=COLUMN)
    place = gl.arange(0, TILE, layout=ROW)
    # Compared with 2 * (place >> 3), a constant of each register: the token's place in its lane's run.
    lane_token = (place & 1) + ((place >> 1) & 3) * W
    c = scale * (LOG2E * CODE_UNIT)
    if not TOKEN_KEYS:
        c = c * (255 // ((1 << KB) - 1))
    if CAPPED:
        c = c / LOG2E

    word = gl.load(words)
    k_base, k_slot = _run_pointer(pages, gl.load(tile_pages + k_run), page_bytes, _first(word), k_run, TILE, T)
    v_ids = gl.load(tile_pages + v_run)
    codes = gl.load((k_base + k_slot * DK).to(WORD, bitcast=True)[:, None, None] + k_at)
    header = ()
    if not TOKEN_KEYS:
        for k in gl.static_range(NKF):
            at = headers + (word >> 32) * header_stride + (NKF - 1 - k) * DK
            header = header + (gl.load(at.to(WORD, bitcast=True) + h_word),)
        qz = gl.load(qz_scratch + ((word >> 24) & 0xFF) * NQ + column)
    next_word = gl.load(words + 1)
    next_k_ids = gl.load(tile_pages + 4 + k_run)
    next_v_ids = gl.load(tile_pages + 4 + v_run)
    for i in range(n_tiles):
        first = _first(word)
        live = _live(word)
        v_base, v_slot = _run_pointer(pages, v_ids, page_bytes, first, v_run, TILE, T)
        values = ()
        for r in gl.static_range(PARTS):
            at = (v_base + (VOFF + r * ROWS * T) + v_slot).to(WORD, bitcast=True)
            values = values + (gl.load(at[None, :, None] + v_at),)
        m_ids = gl.convert_layout(v_ids, gl.SliceLayout(0, gl.SliceLayout(2, LM)), assert_trivial=True)
        m_base, m_slot = _run_pointer(pages, m_ids, page_bytes, first, m_run, TILE, T)
        zeros = gl.load((m_base + (VMETA + 2 * T) + 2 * m_slot).to(WORD, bitcast=True)[None, :, None] + m_at)
        t_ids = gl.convert_layout(v_ids, gl.SliceLayout(1, LT), assert_trivial=True)
        t_base, t_slot = _run_pointer(pages, t_ids, page_bytes, first, t_run, TILE, T)
        weights = ()
        for g in gl.static_range(GROUPS):
            at = (t_base + (VMETA + 4 * g * T) + 2 * t_slot).to(WORD, bitcast=True)
            weights = weights + (gl.load(at[:, None] + t_pair[None, :]),)

        fields = nested(codes, KB)
        s = gl.zeros([TILE, NQ], gl.float32, layout=MMA)
        if TOKEN_KEYS:
            for k in gl.static_range(NKF):
                s = mma_v2(key_operand(fields[k], TILE, DK), q[k], s)
            k_meta = (k_base + (KMETA + 2 * k_slot)).to(gl.pointer_type(gl.float16), bitcast=True)
            s = _scale_rows(s, k_meta, k_token, qsum, c, T, TILE)
        else:
            above = gl.zeros([DK, NQ], gl.float16, layout=B_OP)
            for k in gl.static_range(NKF):
                mine = q[k] * feature_column(pairs(header[k]), DK)[:, None]
                s = mma_v2(key_operand(fields[k], TILE, DK), mine if k == 0 else mine - above, s)
                above = mine
            if CAPPED:
                s = s * c + qz[None, :]
        if CAPPED:
            s = _capped(s, cap) * LOG2E
        if not TOKEN_KEYS:
            zero_part = qz

        # The next tile's keys.
        word = next_word
        k_base, k_slot = _run_pointer(pages, next_k_ids, page_bytes, _first(word), k_run, TILE, T)
        codes = gl.load((k_base + k_slot * DK).to(WORD, bitcast=True)[:, None, None] + k_at)
        header = ()
        if not TOKEN_KEYS:
            for k in gl.static_range(NKF):
                at = headers + (word >> 32) * header_stride + (NKF - 1 - k) * DK
                header = header + (gl.load(at.to(WORD, bitcast=True) + h_word),)
            qz = gl.load(qz_scratch + ((word >> 24) & 0xFF) * NQ + column)
        v_ids = next_v_ids
        next_word = gl.load(words + i + 2)
        next_k_ids = gl.load(tile_pages + (i + 2) * 4 + k_run)
        next_v_ids = gl.load(tile_pages + (i + 2) * 4 + v_run)

        zeros = gl.where((m_group < GROUPS)[:, None, None], zeros, ones)
        if live < TILE:
            s = gl.where((2 * (place >> 3) < live - lane_token)[:, None], s, NEG)
            zeros = zeros & _pair_mask((m_pair * 2)[None, None, :], (live - m_run * W)[None, :, None])
            masked = ()
            for g in gl.static_range(GROUPS):
                masked = masked + (weights[g] & _pair_mask((t_pair * 2)[None, :], (live - t_run * W)[:, None]),)
            weights = masked
        if CAPPED or TOKEN_KEYS:
            top = gl.maximum(m, gl.max(s, 0))
            p = gl.exp2(s - (top - P_SHIFT)[None, :])
        else:
            # The maximum of the raw products is enough (c > 0): one FMA an element serves scale, zero and maximum.
            top = gl.maximum(m, gl.max(s, 0) * c + zero_part)
            p = gl.exp2(s * c + (zero_part - top + P_SHIFT)[None, :])
        keep = gl.exp2(m - top)[None, :]
        m = top
        p = transpose_p(p, TILE, NQ, gl.float16)
        zacc = mma_v2(meta_operand(zeros, eighth, TILE), p, zacc * keep)
        acc_next = ()
        for r in gl.static_range(PARTS):
            fields = crumbs(values[r]) if VB == 2 else nested(values[r], VB)
            for f in gl.static_range(NVF):
                weight = p * token_weights(weights[(f * DV + r * ROWS) // ROW_GROUP], TILE)[:, None]
                acc_next = acc_next + (mma_v2(value_operand(fields[f], ROWS, TILE), weight, acc[r * NVF + f] * keep),)
        acc = acc_next
    return acc, zacc, m


@gluon.jit
def _scale_rows(s, k_meta, k_token, qsum, c, T: gl.constexpr, TILE: gl.constexpr):
    """Logits of per-token keys: s * scale[token] + zero[token] * sum(q)."""
    scale = gl.load(k_meta[:, None] + k_token[None, :])
    zero = gl.load(k_meta[:, None] + T + k_token[None, :])
    scale = gl.reshape(gl.permute(gl.reshape(scale, [4, TILE // 8, 2]), [1, 0, 2]), [TILE])
    zero = gl.reshape(gl.permute(gl.reshape(zero, [4, TILE // 8, 2]), [1, 0, 2]), [TILE])
    scale = gl.convert_layout(scale, ROW, assert_trivial=True).to(gl.float32) * c
    zero = gl.convert_layout(zero, ROW, assert_trivial=True).to(gl.float32) * (c / CODE_UNIT)
    return s * scale[:, None] + zero[:, None] * qsum[None, :]


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
    WORD: gl.constexpr = gl.pointer_type(gl.int32)
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

    word = gl.load(words)
    k_base, k_slot = _run_pointer(pages, gl.load(tile_pages + k_run), page_bytes, _first(word), k_run, TILE, T)
    v_ids = gl.load(tile_pages + v_run)
    keys = gl.load((k_base + k_slot * (2 * D)).to(WORD, bitcast=True)[:, None, None] + k_at)
    next_word = gl.load(words + 1)
    next_k_ids = gl.load(tile_pages + 4 + k_run)
    next_v_ids = gl.load(tile_pages + 4 + v_run)
    for i in range(n_tiles):
        live = _live(word)
        v_base, v_slot = _run_pointer(pages, v_ids, page_bytes, _first(word), v_run, TILE, T)
        values = gl.load((v_base + (VOFF + v_slot * (2 * D))).to(WORD, bitcast=True)[:, None, None] + v_at)
        s = gl.zeros([TILE, NQ], gl.float32, layout=MMA)
        s = mma_v2(key_operand(pairs(keys, dtype), TILE, D, True), q, s)

        word = next_word
        k_base, k_slot = _run_pointer(pages, next_k_ids, page_bytes, _first(word), k_run, TILE, T)
        keys = gl.load((k_base + k_slot * (2 * D)).to(WORD, bitcast=True)[:, None, None] + k_at)
        v_ids = next_v_ids
        next_word = gl.load(words + i + 2)
        next_k_ids = gl.load(tile_pages + (i + 2) * 4 + k_run)
        next_v_ids = gl.load(tile_pages + (i + 2) * 4 + v_run)

        if CAPPED:
            s = _capped(s * scale, cap) * LOG2E
        else:
            s = s * c
        if live < TILE:
            # What lies behind a block's tokens may spell NaN, which 0 * p does not silence.
            s = gl.where((2 * (place >> 3) < live - lane_token)[:, None], s, NEG)
            values = gl.where((v_token[None, :, None] < (live - v_run * W)[:, None, None]), values, 0)
        top = gl.maximum(m, gl.max(s, 0))
        p = gl.exp2(s - (top - P_SHIFT)[None, :])
        keep = gl.exp2(m - top)[None, :]
        m = top
        p = transpose_p(p, TILE, NQ, dtype)
        lacc = mma_v2(ones, p, lacc * keep)
        acc = mma_v2(plain_value_operand(values, D, TILE, dtype), p, acc * keep)
    return acc, lacc, m
