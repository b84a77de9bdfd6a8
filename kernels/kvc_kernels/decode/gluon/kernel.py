"""Decode kernel in Gluon, one warp per program: work lists, scratch and results of the Triton kernel in `attention.py`.
"""

# ruff: noqa: RUF005  (the compiler knows no unpacking inside tuples)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from ...common.format_class import KEY_BITS, SIDE, TILE_TOKENS, TOKENS, VALUE_BITS, VALUE_CODES, VALUE_META
from ...common.unpack_kernel import CODE_UNIT, LOG2E, NEG
from ..body_kernel import P_SHIFT
from .body import CHUNK, list_tiles, packed_part, plain_part, zero_products
from .queue import make_queue
from .tiles import B_OP, COLUMN, MMA, ROW, feature_of, hidden_zero, plain_feature_of


@gluon.jit
def _finish(part_ml, part, column, m, l, G: gl.constexpr):
    ml = part_ml + part * 2
    gl.store(ml + column * 2, m - P_SHIFT, mask=column < G)
    gl.store(ml + column * 2 + 1, l, mask=column < G)


@gluon.jit
def _plain_program(
    q_ptr, q_stride_h, part_o, part_ml, part, words, tile_pages, entries, blocks, pages, table, row, scale, cap,
    page_bytes: gl.constexpr, ROW_STRIDE: gl.constexpr, G: gl.constexpr, NQ: gl.constexpr, D: gl.constexpr,
    T: gl.constexpr, VOFF: gl.constexpr, CAPPED: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """One work item of uncompressed blocks. row: offset of this layer and head in a block's table; part: offset of its
    results.
    """
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    k = gl.arange(0, D, layout=gl.SliceLayout(1, B_OP))
    g = gl.arange(0, NQ, layout=gl.SliceLayout(0, B_OP)) + hidden_zero(blocks)
    at = q_ptr + (g * q_stride_h)[None, :] + feature_of(k, D, True)[:, None]
    q = gl.load(at, mask=(g < G)[None, :], other=0.0)
    acc = gl.zeros([D, NQ], gl.float32, layout=MMA)
    lacc = gl.zeros([16, NQ], gl.float32, layout=MMA)
    m = gl.full([NQ], NEG, gl.float32, layout=COLUMN)
    for first in range(0, blocks, CHUNK):
        n = gl.minimum(blocks - first, CHUNK)
        tiles = list_tiles(
            words, tile_pages, entries + first, n, table, 0, table + row, ROW_STRIDE, TILE, T, 1, True, 4
        )
        gl.barrier()
        acc, lacc, m = plain_part(
            acc, lacc, m, q, words, tile_pages, tiles, pages, page_bytes, scale, cap,
            D, NQ, T, VOFF, CAPPED, TILE, dtype,
        )  # fmt: skip
        gl.barrier()
    out = part_o + part * D
    feature = plain_feature_of(gl.arange(0, D, layout=ROW))
    column = gl.arange(0, NQ, layout=COLUMN) + hidden_zero(blocks)
    gl.store(out + (column * D)[None, :] + feature[:, None], acc, mask=(column < G)[None, :])
    _finish(part_ml, part, column, m, gl.max(lacc, 0), G)


@gluon.jit
def _packed_program(
    q_ptr, q_stride_h, part_o, part_ml, part, words, tile_pages, qz, entries, blocks, pages, table, counts, headers,
    head, scale, cap, page_bytes: gl.constexpr, LH: gl.constexpr, E: gl.constexpr, G: gl.constexpr, NQ: gl.constexpr,
    D: gl.constexpr, KB: gl.constexpr, VB: gl.constexpr, T: gl.constexpr, SIDE: gl.constexpr,
    VOFF: gl.constexpr, VMETA: gl.constexpr, CAPPED: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """One work item of packed blocks in one format. `head` = layer * H + KV head; part: place of its results."""
    DK: gl.constexpr = D * KB // 8
    DV: gl.constexpr = D * VB // 8
    ROWS: gl.constexpr = DV if VB > 2 or DV < 32 else 32
    GROUPS: gl.constexpr = D // 32 if VB == 2 else 1
    ROW_GROUP: gl.constexpr = D if VB > 2 else 32
    NKF: gl.constexpr = 8 // KB
    NVF: gl.constexpr = 8 // VB
    k = gl.arange(0, DK, layout=gl.SliceLayout(1, B_OP))
    g = gl.arange(0, NQ, layout=gl.SliceLayout(0, B_OP)) + hidden_zero(blocks)
    q = ()
    for f in gl.static_range(NKF):
        at = q_ptr + (g * q_stride_h)[None, :] + ((NKF - 1 - f) * DK + feature_of(k, DK))[:, None]
        x = gl.load(at, mask=(g < G)[None, :], other=0.0).to(gl.float32)
        u = x * (1.0 / (1 << (KB * (NKF - 1 - f))))
        q = q + (u.to(gl.float16),)
    acc = ()
    for _ in gl.static_range(DV // ROWS * NVF):
        acc = acc + (gl.zeros([ROWS, NQ], gl.float32, layout=MMA),)
    zacc = gl.zeros([16, NQ], gl.float32, layout=MMA)
    m = gl.full([NQ], NEG, gl.float32, layout=COLUMN)
    row = table + head * E + SIDE * (E - 1)
    header = headers + head * (2 * D)
    queue = make_queue(D, KB, VB, GROUPS, TILE)
    for first in range(0, blocks, CHUNK):
        n = gl.minimum(blocks - first, CHUNK)
        tiles = list_tiles(
            words, tile_pages, entries + first, n, counts + head * 2 + SIDE, LH * 2, row, LH * E,
            TILE, T, 1 - 2 * SIDE, False, 4,
        )  # fmt: skip
        factor = scale if CAPPED else scale * LOG2E
        zero_products(qz, q, header + D, LH * 2 * D, entries + first, n, factor, DK, NQ, KB)
        gl.barrier()
        acc, zacc, m = packed_part(
            acc, zacc, m, q, words, tile_pages, qz, queue, tiles, pages, page_bytes, header, LH * 2 * D, scale,
            cap, D, NQ, KB, VB, T, VOFF, VMETA, CAPPED, TILE,
        )  # fmt: skip
        gl.barrier()
    column = gl.arange(0, NQ, layout=COLUMN) + hidden_zero(blocks)
    out = part_o + part * D
    rows = gl.arange(0, ROWS, layout=ROW)
    sixteen = gl.arange(0, 16, layout=ROW)
    for r in gl.static_range(DV // ROWS):
        for f in gl.static_range(NVF):
            zero = gl.sum(gl.where((sixteen == (f * DV + r * ROWS) // ROW_GROUP)[:, None], zacc, 0.0), 0)
            if VB == 2:
                field = acc[r * NVF + f]
            elif f == NVF - 1:
                # `nested`: field f = F[n-1-f] - F[n-f], and F[n] = 0.
                field = acc[0] - acc[1] if VB == 4 else acc[0]
            else:
                field = acc[1]
            o = field * (CODE_UNIT / (1 << (VB * f))) + zero[None, :]
            at = out + (column * D)[None, :] + (f * DV + r * ROWS + rows)[:, None]
            gl.store(at, o, mask=(column < G)[None, :])
    _finish(part_ml, part, column, m, gl.sum(gl.where((sixteen == GROUPS)[:, None], zacc, 0.0), 0), G)


@gluon.jit(do_not_specialize=["NB", "layer", "cap", "scale"])
def decode_kernel(
    q_ptr, q_stride_b, q_stride_h, part_o, part_ml, scratch, items, column_ranges, lists,
    pages, table, counts, headers, NB, layer, scale, cap,
    L: gl.constexpr, H: gl.constexpr, G: gl.constexpr, NQ: gl.constexpr, D: gl.constexpr, E: gl.constexpr,
    P: gl.constexpr, page_bytes: gl.constexpr, CLASSES: gl.constexpr, SCRATCH: gl.constexpr, WORDS: gl.constexpr,
    CAPPED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """grid (columns * H,). part_o fp32 `[items, H, G, D]`, part_ml fp32 `[items, H, G, 2]`."""
    if PDL:
        gdc_wait()
    pid = gl.program_id(0)
    h = pid % H
    head = (layer * H + h).to(gl.int64)
    words = scratch + pid.to(gl.int64) * SCRATCH
    qz = (words + WORDS).to(gl.pointer_type(gl.float32), bitcast=True)
    tile_pages = (words + WORDS + CHUNK * NQ // 2).to(gl.pointer_type(gl.int32), bitcast=True)
    for item in range(gl.load(column_ranges + pid // H), gl.load(column_ranges + pid // H + 1)):
        request = gl.load(items + item * 4)
        cls = gl.load(items + item * 4 + 1)
        start = gl.load(items + item * 4 + 2)
        blocks = gl.load(items + item * 4 + 3)
        entries = lists + (request * len(CLASSES) + cls).to(gl.int64) * NB + start
        q_row = q_ptr + request.to(gl.int64) * q_stride_b + h * G * q_stride_h
        part = (item * H + h).to(gl.int64) * G
        for c in gl.static_range(len(CLASSES)):
            if cls == c:
                if CLASSES[c][KEY_BITS] == 16:
                    _plain_program(
                        q_row, q_stride_h, part_o, part_ml, part, words, tile_pages, entries, blocks, pages, table,
                        head * E, scale, cap, page_bytes, L * H * E, G, NQ, D, CLASSES[c][TOKENS],
                        CLASSES[c][VALUE_CODES], CAPPED, CLASSES[c][TILE_TOKENS],
                    )  # fmt: skip
                else:
                    _packed_program(
                        q_row, q_stride_h, part_o, part_ml, part, words, tile_pages, qz, entries, blocks, pages, table,
                        counts, headers, head, scale, cap, page_bytes, L * H, E, G, NQ, D, CLASSES[c][KEY_BITS],
                        CLASSES[c][VALUE_BITS], CLASSES[c][TOKENS], CLASSES[c][SIDE],
                        CLASSES[c][VALUE_CODES], CLASSES[c][VALUE_META], CAPPED, CLASSES[c][TILE_TOKENS],
                    )  # fmt: skip
