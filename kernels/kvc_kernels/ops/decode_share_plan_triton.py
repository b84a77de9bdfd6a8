"""The plan of `decode_share_triton`: what a block costs in each layer and head, and where programs begin.

By a sample of counts (`_weigh_kernel`), or by every count of the step (`_line_kernel`, `_cut_kernel`). Fixed grids,
integers only, no atomics: the same bits every run, and fit for a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..store import PageStore
from .decode_plan_triton import DecodePlan, _split_kernel

SAMPLES = 8  # blocks of a list whose counts are read
UNIT = 256  # of cost, a tile
BLOCK_COST = 32  # header, products with its zeros, list entry


@triton.jit
def _deal(load, widest, programs, h, H: tl.constexpr):
    """First program of each head and how many of its programs work: one each, the others by `load`."""
    front = (tl.cumsum(load, 0) - load).to(tl.int64)
    total = tl.maximum(tl.sum(load.to(tl.int64), 0), 1)
    spare = programs - H
    first = h + (front * spare // total).to(tl.int32)
    last = h + ((front + load) * spare // total).to(tl.int32)
    return first, tl.minimum(last + 1 - first, load // widest)


@triton.jit(do_not_specialize=["NB", "batch", "programs"])
def _weigh_kernel(
    lists, sizes, counts, weights, before, shares, batch, programs, NB,
    L: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, NC: tl.constexpr, CLASSES: tl.constexpr, MB: tl.constexpr,
    WIDTH: tl.constexpr, SAMPLES: tl.constexpr, STEP: tl.constexpr, BLOCK_COST: tl.constexpr,
):
    """grid (L,). `weights`; int32 `before[C, MB + 1]`: blocks of a class in the requests in front of each; and int32
    `shares[L, 4, H]`: first program of a head, programs of it that work, and the cost of each: [2], one more for the
    first [3] of them. Every head has a program, the others are dealt by cost; none works on less than a block.

    CLASSES: per class (cost of a tile, tokens of a tile, side); of uncompressed blocks the first is that of a block.
    """
    layer = tl.program_id(0)
    h = tl.arange(0, HP)
    load = tl.zeros([HP], tl.int32)
    widest = tl.full([HP], 1, tl.int32)
    for c in tl.static_range(NC):
        r = tl.arange(0, WIDTH)
        n_blocks = tl.load(sizes + r * NC + c, mask=r < batch, other=0)
        if layer == 0:
            tl.store(before + c * (MB + 1) + r + 1, tl.cumsum(n_blocks, 0), mask=r < MB)
        if c == 0:
            weight = tl.full([HP], CLASSES[0][0], tl.int32)
        else:
            tiles = tl.zeros([HP], tl.int32)
            found = tl.zeros([], tl.int32)
            for at in range(0, batch * SAMPLES, STEP):
                i = at + tl.arange(0, STEP)
                b = i // SAMPLES
                k = i % SAMPLES
                n = tl.load(sizes + b * NC + c, mask=b < batch, other=0)
                ok = k < n
                place = tl.where(n > SAMPLES, k * n // SAMPLES, k)
                block = tl.load(lists + (b * NC + c).to(tl.int64) * NB + place, mask=ok, other=0) >> 32
                at_count = counts + ((block * L + layer) * H)[:, None] * 2 + (h * 2 + CLASSES[c][2])[None, :]
                count = tl.load(at_count, mask=ok[:, None] & (h < H)[None, :], other=0).to(tl.int32)
                tiles += tl.sum((count + CLASSES[c][1] - 1) // CLASSES[c][1], 0)
                found += tl.sum(ok.to(tl.int32), 0)
            weight = BLOCK_COST + tiles * CLASSES[c][0] // tl.maximum(found, 1)
        tl.store(weights + (layer * H + h) * NC + c, weight, mask=h < H)
        of_class = tl.sum(n_blocks, 0)
        load += tl.where(h < H, of_class * weight, 0)
        widest = tl.maximum(widest, tl.where(of_class > 0, weight, 1))
    first, working = _deal(load, widest, programs, h, H)
    to = shares + layer * (4 * H) + h
    tl.store(to, first, mask=h < H)
    tl.store(to + H, working, mask=h < H)
    tl.store(to + 2 * H, load // tl.maximum(working, 1), mask=h < H)
    tl.store(to + 3 * H, load % tl.maximum(working, 1), mask=h < H)


@triton.jit
def _part_of(x, width, wider):
    """The part of a head's cost that `x` lies in: the first `wider` of them are one unit wider than `width`."""
    front = wider * (width + 1)
    return tl.where(x < front, x // (width + 1), wider + (x - front) // width)


@triton.jit(do_not_specialize=["NB", "batch"])
def _line_kernel(
    lists, sizes, before, line, batch, NB, NC: tl.constexpr, MB: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
):
    """grid (MB,). All lists end to end, int64 (block << 32 | class << 24 | tokens), and `before`."""
    b = tl.program_id(0)
    r = tl.arange(0, WIDTH)
    at_line = tl.zeros([], tl.int32)
    for c in tl.static_range(NC):
        front = tl.sum(tl.load(sizes + r * NC + c, mask=(r < batch) & (r < b), other=0), 0)
        n = tl.load(sizes + b * NC + c, mask=b < batch, other=0)
        tl.store(before + c * (MB + 1) + b + 1, front + n)
        at_line += front
    for c in tl.static_range(NC):
        n = tl.load(sizes + b * NC + c, mask=b < batch, other=0)
        for k in range(0, n, STEP):
            i = k + tl.arange(0, STEP)
            e = tl.load(lists + (b * NC + c).to(tl.int64) * NB + i, mask=i < n, other=0)
            tl.store(line + at_line + i, e | (c << 24), mask=i < n)
        at_line += n


@triton.jit
def _line_costs(
    line, counts, classes, at, n, layer, L: tl.constexpr, H: tl.constexpr, HP: tl.constexpr,
    STEP: tl.constexpr, BLOCK_COST: tl.constexpr,
):
    """int32 `[STEP, HP]`: cost of the blocks from `at` on in each head; 0 behind the last."""
    i = at + tl.arange(0, STEP)
    h = tl.arange(0, HP)
    e = tl.load(line + i, mask=i < n, other=0)
    cls = (e >> 24).to(tl.int32) & 0xFF
    tokens = (e & 0xFFFFFF).to(tl.int32)
    cost = tl.load(classes + cls * 3)
    tile = tl.load(classes + cls * 3 + 1)
    side = tl.load(classes + cls * 3 + 2)
    where = counts + (((e >> 32) * L + layer) * H * 2 + side)[:, None] + (h * 2)[None, :]
    count = tl.load(where, mask=((i < n) & (cls > 0))[:, None] & (h < H)[None, :], other=0).to(tl.int32)
    count = tl.where((cls == 0)[:, None], tokens[:, None], count)
    tiles = (count + tile[:, None] - 1) // tile[:, None]
    return tl.where((i < n)[:, None] & (h < H)[None, :], BLOCK_COST + tiles * cost[:, None], 0)


@triton.jit(do_not_specialize=["programs"])
def _cut_kernel(
    line, counts, classes, before, shares, cuts, programs,
    L: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, NC: tl.constexpr, MB: tl.constexpr,
    STEP: tl.constexpr, BLOCK_COST: tl.constexpr,
):
    """grid (L,). `shares` as `_weigh_kernel`, and int32 `cuts[L, programs + 1]`: a program's blocks on the line.

    A program has the blocks that begin in its part of the head's cost. No part is narrower than the widest block.
    """
    layer = tl.program_id(0)
    h = tl.arange(0, HP)
    n = tl.zeros([], tl.int32)
    for c in tl.static_range(NC):
        n += tl.load(before + c * (MB + 1) + MB)
    load = tl.zeros([HP], tl.int32)
    widest = tl.full([HP], 1, tl.int32)
    for at in range(0, n, STEP):
        cost = _line_costs(line, counts, classes, at, n, layer, L, H, HP, STEP, BLOCK_COST)
        load += tl.sum(cost, 0)
        widest = tl.maximum(widest, tl.max(cost, 0))
    first, working = _deal(load, widest, programs, h, H)
    parts = tl.maximum(working, 1)
    width = load // parts
    wider = load % parts
    to = shares + layer * (4 * H) + h
    tl.store(to, first, mask=h < H)
    tl.store(to + H, working, mask=h < H)
    cut = cuts + layer * (programs + 1) + first
    # A head's end is stored with its last block below; where the next head's programs begin, its own 0 must stay.
    tl.store(cut, tl.zeros([HP], tl.int32), mask=h < H)
    done = tl.zeros([HP], tl.int32)
    for at in range(0, n, STEP):
        cost = _line_costs(line, counts, classes, at, n, layer, L, H, HP, STEP, BLOCK_COST)
        y = tl.cumsum(cost, 0) + done[None, :]
        done += tl.sum(cost, 0)
        here = _part_of(y - cost, tl.maximum(width, 1)[None, :], wider[None, :])
        there = _part_of(y, tl.maximum(width, 1)[None, :], wider[None, :])
        i = at + tl.arange(0, STEP)
        ok = (there > here) & (there < working[None, :]) & (i < n)[:, None] & (h < H)[None, :]
        tl.store(cut[None, :] + there, (i + 1)[:, None] + tl.zeros([STEP, HP], tl.int32), mask=ok)


class SharePlan(DecodePlan):
    """`DecodePlan` with weights `[L, H, C]` and `before[C, B + 1]` in place of items and ranges."""

    def describe(self, classes: tuple[tuple[int, ...], ...], block_tokens: int, tile_cost) -> None:
        """`classes` as the kernel has them; `tile_cost(c)`: relative time of a tile of a packed class."""
        plain = classes[0][7]
        costs = [(UNIT // 2 if self.exact else UNIT * block_tokens // plain // 2, plain, 0)]
        costs += [(max(1, round(UNIT * tile_cost(c))), c[7], c[3]) for c in classes[1:]]
        self.costs = tuple(costs)
        self.class_costs = torch.tensor(costs, dtype=torch.int32, device=self.sizes.device)

    def update(self, store: PageStore, row_blocks: torch.Tensor, seq_lens: torch.Tensor) -> None:
        batch, nc, layout = row_blocks.shape[0], len(self.classes), store.layout
        if batch > self.max_batch or row_blocks.shape[1] > self.max_blocks:
            raise ValueError(f"plan is for {self.max_batch} x {self.max_blocks}, got {tuple(row_blocks.shape)}")
        if batch == 0:
            return
        _split_kernel[(batch,)](
            row_blocks, row_blocks.stride(0), seq_lens, store.rung, self.rung_classes, self._no_skip, self.lists,
            self.sizes, self.max_blocks, nc, layout.block_tokens, 128, num_warps=4,
        )
        if self.exact:
            width = triton.next_power_of_2(self.max_batch)
            _line_kernel[(self.max_batch,)](
                self.lists, self.sizes, self.before, self.line, batch, self.max_blocks, nc, self.max_batch, width,
                128, num_warps=4,
            )  # fmt: skip
            _cut_kernel[(layout.layers,)](
                self.line, store.counts, self.class_costs, self.before, self.shares, self.cuts,
                self.columns * layout.heads,
                layout.layers, layout.heads, triton.next_power_of_2(layout.heads), nc, self.max_batch,
                1024, BLOCK_COST, num_warps=8,
            )  # fmt: skip
            return
        _weigh_kernel[(layout.layers,)](
            self.lists, self.sizes, store.counts, self.head_weights, self.before, self.shares, batch,
            self.columns * layout.heads, self.max_blocks,
            layout.layers, layout.heads, triton.next_power_of_2(layout.heads), nc, self.costs, self.max_batch,
            triton.next_power_of_2(self.max_batch), SAMPLES, 256, BLOCK_COST, num_warps=8,
        )
