"""Causal attention with a sliding window over dense rows in slots: `windowed.py` without a prefill library."""

# ruff: noqa: RUF005  (the compiler knows no unpacking inside tuples)
from __future__ import annotations

import triton
import triton.language as tl

from ..common.unpack_kernel import NEG
from .body_kernel import add_dense, load_q


@triton.jit(do_not_specialize=["scale", "cap"], do_not_specialize_on_alignment=["q", "out", "slots"])
def window_kernel(
    q, q_stride_n, q_stride_h, out, k, v, tiles, slots, scale, cap,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr, WINDOW: tl.constexpr, BM: tl.constexpr,
    TILE: tl.constexpr, WIDTH: tl.constexpr, CAPPED: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):
    """grid (tiles, H). q, out `[N, Hq, D]` (out contiguous); k, v `[slots, P, H, D]`.

    tiles int32 `[n, 8]`: first query of a run, first row (new token x query head of the group), end row, its first
    entry in `slots`, keys in its slots. The run's new tokens are the last keys. TILE divides P.
    """
    item = tiles + tl.program_id(0) * 8
    h = tl.program_id(1)
    start = tl.load(item)
    row0 = tl.load(item + 1)
    rows = tl.load(item + 2)
    run_slots = slots + tl.load(item + 3)
    keys = tl.load(item + 4)
    row = row0 + tl.arange(0, BM)
    valid = row < rows
    old = keys - rows // G  # keys before the run's own
    place = old + row // G
    hq = h * G + row % G
    token = (start + row // G).to(tl.int64)
    query = load_q(q + token * q_stride_n + hq * q_stride_h, valid, q.dtype.element_ty, D, 1)
    d = tl.arange(0, D)
    t = tl.arange(0, TILE)
    w = tl.arange(0, WIDTH)
    acc = ()
    for _ in tl.static_range(D // WIDTH):
        acc = acc + (tl.zeros([BM, WIDTH], tl.float32),)
    m = tl.full([BM], NEG, tl.float32)
    l = tl.zeros([BM], tl.float32)
    first = tl.maximum(old + row0 // G - WINDOW, 0) // TILE * TILE
    last = old + (tl.minimum(row0 + BM, rows) + G - 1) // G
    for t0 in tl.range(first, last, TILE, num_stages=STAGES):
        slot = tl.load(run_slots + t0 // P).to(tl.int64)
        at = ((slot * P + t0 % P + t) * H + h) * D
        key = t0 + t
        live = key < last
        kt = tl.load(k + at[:, None] + d[None, :], mask=live[:, None], other=0.0)
        values = ()
        for j in tl.static_range(D // WIDTH):
            values = values + (tl.load(v + at[:, None] + (j * WIDTH + w)[None, :], mask=live[:, None], other=0.0),)
        ok = (key[None, :] <= place[:, None]) & (key[None, :] >= place[:, None] - WINDOW)
        acc, m, l = add_dense(acc, m, l, query[0], kt, values, ok, scale, cap, CAPPED, ASM)
    to = (token * (H * G) + hq) * D
    divisor = tl.where(l > 0, l, 1.0)
    for j in tl.static_range(D // WIDTH):
        x = (acc[j] / divisor[:, None]).to(out.dtype.element_ty)
        tl.store(out + to[:, None] + (j * WIDTH + w)[None, :], x, mask=valid[:, None])
