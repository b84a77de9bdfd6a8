"""Extend attention on Hopper: warp-specialised, for tiles of 256 (or 128) query rows; head_dim 128.

One warpgroup turns pages into fp16 tiles of 64 keys and values in shared memory, whatever their format; two others,
with half of the rows each, multiply them (wgmma) and do the softmax. So unpacking runs beside the tensor cores, serves
all rows, and the two softmax halves fall into each other's gaps. Written in Gluon: the plain Triton kernel of
`extend_attention_triton` does the same work, everywhere, with every warp doing all of it in turn.
"""

# ruff: noqa: RUF005  (the compiler knows no unpacking inside tuples)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..layout import TOKEN
from ..store import PageStore
from .extend_body_triton import list_tiles
from .extend_unpack_triton import FLAT, RING, unpack_partition

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
NEG: tl.constexpr = tl.constexpr(-1.0e30)


@triton.jit(do_not_specialize=["layer", "NB", "stride"])
def tile_words_kernel(
    words, n_words, items, lists, sizes, NB, counts, layer, stride,
    H: tl.constexpr, G: tl.constexpr, LH: tl.constexpr, CLASSES: tl.constexpr, BM: tl.constexpr, CHUNK: tl.constexpr,
    MAX_TILES: tl.constexpr, OWN: tl.constexpr,
):
    """grid (items * H,): the tiles of each program, int64 `[items * H, stride]`, and their number, int32 `[items * H]`.

    A word is block << 32 | class << 24 | first token << 12 | tokens of the block; for the new tokens themselves (OWN)
    first token << 32 | 15 << 24 | tokens of the tile.
    """
    pid = tl.program_id(0)
    item = items + (pid // H) * 8
    request = tl.load(item)
    row0 = tl.load(item + 2)
    rows = tl.load(item + 3)
    part = tl.load(item + 4)
    parts = tl.load(item + 5)
    head = layer * H + pid % H
    to = words + pid.to(tl.int64) * stride
    total = tl.zeros([], tl.int32)
    for c in tl.static_range(len(CLASSES)):
        n = tl.load(sizes + request * len(CLASSES) + c)
        lo = (n.to(tl.int64) * part // parts).to(tl.int32)
        hi = (n.to(tl.int64) * (part + 1) // parts).to(tl.int32)
        entries = lists + (request * len(CLASSES) + c).to(tl.int64) * NB
        for at in range(lo, hi, CHUNK):
            some = tl.minimum(hi - at, CHUNK)
            total += list_tiles(
                to + total, entries + at, some, counts + head * 2 + CLASSES[c][3], LH * 2, CHUNK, 64, MAX_TILES,
                CLASSES[c][0] == 16, c,
            )
    if OWN:
        if tl.load(item + 7) == 1:
            last = (tl.minimum(row0 + BM, rows) + G - 1) // G
            i = tl.arange(0, CHUNK)
            for at in range(0, last, 64 * CHUNK):
                t0 = at + i * 64
                word = (t0.to(tl.int64) << 32) | (15 << 24) | tl.minimum(last - t0, 64).to(tl.int64)
                tl.store(to + total + i, word, mask=t0 < last)
                total += tl.minimum((last - at + 63) // 64, CHUNK)
    tl.store(n_words + pid, total)


@gluon.jit
def _load_queries(q, first, rows, start, h, q_stride_n, q_stride_h, q0, q1, H: gl.constexpr, G: gl.constexpr):
    """64 query rows as fp16 into two halves of features `[64, 64]` each."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = first + gl.arange(0, 64, gl.SliceLayout(1, L))
    d = gl.arange(0, 64, gl.SliceLayout(0, L))
    at = q + (start + row // G).to(gl.int64) * q_stride_n + (h * G + row % G) * q_stride_h
    x = gl.load(at[:, None] + d[None, :], mask=(row < rows)[:, None], other=0.0)
    q0.store(x.to(gl.float32).to(gl.float16))
    x = gl.load((at + 64)[:, None] + d[None, :], mask=(row < rows)[:, None], other=0.0)
    q1.store(x.to(gl.float32).to(gl.float16))


@gluon.jit
def _probabilities(s, word, m, token, scale, cap, L_S: gl.constexpr, CAPPED: gl.constexpr):
    """Raw products `[64, 64]` of one tile -> p, new maximum, factor for what was summed before."""
    if CAPPED:
        s = cap * (1.0 - 2.0 / (gl.exp2(s * (scale * 2.0 * LOG2E / cap)) + 1.0))
        factor = LOG2E
    else:
        factor = scale * LOG2E
    count = (word & 0xFFF).to(gl.int32) - ((word >> 12) & 0xFFF).to(gl.int32)
    is_own = ((word >> 24) & 15).to(gl.int32) == 15
    if is_own | (count < 64):
        t = gl.arange(0, 64, gl.SliceLayout(0, L_S))
        limit = gl.where(is_own, token - (word >> 32).to(gl.int32) + 1, 64)
        s = gl.where(t[None, :] < gl.minimum(limit, count)[:, None], s, NEG)
    # The maximum of the raw products is enough, as the factor is positive.
    mn = gl.maximum(m, gl.max(s, 1) * factor)
    # A row that has seen nothing must not take exp2(NEG - NEG) = 1 for masked tokens.
    p = gl.exp2(s * factor - gl.where(mn > 0.5 * NEG, mn, 0.0)[:, None])
    return p, mn, gl.exp2(m - mn)


@gluon.jit
def _attend_partition(
    half, words, n, q_smem, k_smem, v_smem, bars, item, slot_row, q, q_stride_n, q_stride_h, out, own_o, own_lse,
    part_o, part_lse, out_lse, scale, cap, h, H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, R: gl.constexpr,
    OWN: gl.constexpr, CAPPED: gl.constexpr, STAGES: gl.constexpr, LSE: gl.constexpr,
):
    """Rows half * R .. of the program's tile against all tiles of keys; `slot_row`: its row in part_lse, or -1.

    The rows are taken 64 at a time, so that the products of one group never share the registers with another's.
    """
    k_full, k_empty, v_full, v_empty = bars
    GROUPS: gl.constexpr = R // 64
    L_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    L_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    L_P: gl.constexpr = gl.DotOperandLayout(0, L_O, 2)
    start = gl.load(item + 1)
    first = gl.load(item + 2) + half * R
    rows = gl.load(item + 3)
    own = gl.load(item + 7)
    d = gl.arange(0, D, gl.SliceLayout(0, L_O))
    r = gl.arange(0, 64, gl.SliceLayout(1, L_O))
    o = ()
    m = ()
    l = ()
    for g in gl.static_range(GROUPS):
        q0 = q_smem.index((half * GROUPS + g) * 2)
        q1 = q_smem.index((half * GROUPS + g) * 2 + 1)
        _load_queries(q, first + g * 64, rows, start, h, q_stride_n, q_stride_h, q0, q1, H, G)
        if OWN:
            o = o + (gl.zeros([64, D], gl.float32, L_O),)
            m = m + (gl.full([64], NEG, gl.float32, gl.SliceLayout(1, L_S)),)
            l = l + (gl.zeros([64], gl.float32, gl.SliceLayout(1, L_S)),)
        else:
            row = first + g * 64 + r
            mine = (row < rows) & (own == 1)
            place = (start + row // G).to(gl.int64) * (H * G) + h * G + row % G
            begun = gl.load(own_o + place[:, None] * D + d[None, :], mask=mine[:, None], other=0.0)
            o = o + (begun.to(gl.float32),)
            lse = gl.convert_layout(gl.load(own_lse + place, mask=mine, other=NEG), gl.SliceLayout(1, L_S))
            m = m + (lse,)
            l = l + (gl.where(lse > NEG, 1.0, 0.0),)
    fence_async_shared()
    gl.thread_barrier()

    zero = gl.zeros([64, 64], gl.float32, L_S)
    for i in range(n):
        word = gl.load(words + i)
        stage = i % STAGES
        phase = i // STAGES & 1
        k0 = k_smem.index(stage * 2).permute((1, 0))
        k1 = k_smem.index(stage * 2 + 1).permute((1, 0))
        v_tile = v_smem.index(stage).permute((1, 0))
        mbarrier.wait(k_full.index(stage), phase)
        o_next = ()
        m_next = ()
        l_next = ()
        for g in gl.static_range(GROUPS):
            q0 = q_smem.index((half * GROUPS + g) * 2)
            q1 = q_smem.index((half * GROUPS + g) * 2 + 1)
            s = warpgroup_mma(q0, k0, zero, use_acc=False, is_async=True)
            s = warpgroup_mma(q1, k1, s, is_async=True)
            s = warpgroup_mma_wait(0, deps=(s,))
            if g == GROUPS - 1:
                mbarrier.arrive(k_empty.index(stage), count=1)
            token = (first + g * 64 + gl.arange(0, 64, gl.SliceLayout(1, L_S))) // G
            p, mn, a = _probabilities(s, word, m[g], token, scale, cap, L_S, CAPPED)
            m_next = m_next + (mn,)
            l_next = l_next + (l[g] * a + gl.sum(p, 1),)
            scaled = o[g] * gl.convert_layout(a, gl.SliceLayout(1, L_O))[:, None]
            p16 = gl.convert_layout(p.to(gl.float16), L_P)
            if g == 0:
                mbarrier.wait(v_full.index(stage), phase)
            y = warpgroup_mma(p16, v_tile, scaled, is_async=True)
            o_next = o_next + (warpgroup_mma_wait(0, deps=(y,)),)
        mbarrier.arrive(v_empty.index(stage), count=1)
        o = o_next
        m = m_next
        l = l_next
    for g in gl.static_range(GROUPS):
        some = gl.where(l[g] > 0, l[g], 1.0)
        x = o[g] * gl.convert_layout(1.0 / some, gl.SliceLayout(1, L_O))[:, None]
        row = first + g * 64 + r
        total = gl.where(l[g] > 0, m[g] + gl.log2(some), NEG)
        if slot_row < 0:
            place = (start + row // G).to(gl.int64) * (H * G) + h * G + row % G
            to = out + place[:, None] * D + d[None, :]
            gl.store(to, x.to(out.dtype.element_ty), mask=(row < rows)[:, None])
            if LSE:
                gl.store(out_lse + place, gl.convert_layout(total, gl.SliceLayout(1, L_O)), mask=row < rows)
        else:
            base = slot_row.to(gl.int64) + half * R + g * 64
            gl.store(part_o + (base + r)[:, None] * D + d[None, :], x)
            gl.store(part_lse + base + gl.arange(0, 64, gl.SliceLayout(1, L_S)), total)


@gluon.jit(do_not_specialize=["layer", "scale", "cap", "stride"])
def extend_hopper_kernel(
    q, q_stride_n, q_stride_h, k, k_stride_n, k_stride_h, v, v_stride_n, v_stride_h, out, own_o, own_lse,
    part_o, part_lse, out_lse, words, n_words, stride, items, pages, table, headers, layer, scale, cap,
    LH: gl.constexpr, H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, E: gl.constexpr, page_bytes: gl.constexpr,
    CLASSES: gl.constexpr, OWN: gl.constexpr, TOKEN_KEYS: gl.constexpr, CAPPED: gl.constexpr, R: gl.constexpr,
    STAGES: gl.constexpr, LSE: gl.constexpr, ATTEND_REGS: gl.constexpr, UNPACK_REGS: gl.constexpr,
):
    """grid (items * H,); arguments as in `_extend_kernel`, tiles from `tile_words_kernel`. 3 warpgroups."""
    pid = gl.program_id(0)
    h = pid % H
    item = items + (pid // H) * 8
    slot = gl.load(item + 6)
    start = gl.load(item + 1).to(gl.int64)
    n = gl.load(n_words + pid)
    mine = words + pid.to(gl.int64) * stride
    head = (layer * H + h).to(gl.int64)
    slot_row = gl.where(slot < 0, -1, (slot * H + h) * (2 * R))

    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    q_smem = gl.allocate_shared_memory(gl.float16, [R // 16, 64, 64], tile)
    k_smem = gl.allocate_shared_memory(gl.float16, [2 * STAGES, 64, 64], tile)
    v_smem = gl.allocate_shared_memory(gl.float16, [STAGES, D, 64], tile)
    raw_k = gl.allocate_shared_memory(gl.uint8, [2 * RING, 64, 64], FLAT)
    raw_v = gl.allocate_shared_memory(gl.uint8, [4 * RING, 128, 16], FLAT)
    raw_m = gl.allocate_shared_memory(gl.float16, [RING, 32, 16], FLAT)
    raw_h = gl.allocate_shared_memory(gl.float16, [RING, 32, 16], FLAT)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    bars = (k_full, k_empty, v_full, v_empty)
    raw = (raw_k, raw_v, raw_m, raw_h)
    gl.warp_specialize(
        [
            (_attend_partition, (
                0, mine, n, q_smem, k_smem, v_smem, bars, item, slot_row, q, q_stride_n, q_stride_h, out, own_o,
                own_lse, part_o, part_lse, out_lse, scale, cap, h, H, G, D, R, OWN, CAPPED, STAGES, LSE,
            )),
            (_attend_partition, (
                1, mine, n, q_smem, k_smem, v_smem, bars, item, slot_row, q, q_stride_n, q_stride_h, out, own_o,
                own_lse, part_o, part_lse, out_lse, scale, cap, h, H, G, D, R, OWN, CAPPED, STAGES, LSE,
            )),
            (unpack_partition, (
                mine, n, raw, k_smem, v_smem, bars, pages, table + head * E, LH * E, headers + head * (2 * D),
                LH * 2 * D, k + start * k_stride_n + h * k_stride_h, v + start * v_stride_n + h * v_stride_h,
                k_stride_n, v_stride_n, page_bytes, E, D, CLASSES, TOKEN_KEYS, OWN, STAGES,
            )),
        ],
        [4, 4],
        [ATTEND_REGS, UNPACK_REGS],
    )  # fmt: skip


STAGES = 3  # unpacked tiles in flight
ATTEND_REGS, UNPACK_REGS, MAX_REGS = 216, 72, 168  # 2 * 216 + 72 = 3 * 168 registers a thread of each warpgroup


def supports(store: PageStore) -> bool:
    """Formats of the ladder and device that the kernel is written for."""
    if store.device.type != "cuda" or torch.cuda.get_device_capability(store.device) != (9, 0):
        return False
    formats = [f for r in store.ladder for f in (r.high, r.low) if f is not None]
    return store.layout.head_dim == 128 and all(f.key_bits > 2 for f in formats)


class HopperExtend:
    """Buffers and launches of one layer; `rows` query rows a program (128 or 256)."""

    def __init__(self, store: PageStore, group: int, classes: tuple[tuple[int, ...], ...]):
        self.store, self.group, self.classes = store, group, classes
        self.words = torch.empty(0, dtype=torch.int64, device=store.device)
        self.n_words = torch.empty(0, dtype=torch.int32, device=store.device)

    def reserve(self, n_items: int, blocks: int, new: int) -> None:
        """Room for the tiles of `n_items` items of at most `blocks` prefix blocks and `new` new tokens."""
        layout = self.store.layout
        # Blocks of two tiers may cost one more tile, and cuts are rounded class by class.
        tiles = (blocks + len(self.classes)) * (-(-layout.block_tokens // 64) + 1) + -(-new // 64)
        self.stride, programs = tiles, n_items * layout.heads
        if self.n_words.numel() < programs:
            self.n_words = self.n_words.new_empty(programs)
        if self.words.numel() < programs * tiles:
            self.words = self.words.new_empty(programs * tiles)

    def launch(self, plan, rows: int, layer: int, q, k, v, out, lse, own, part_o, part_lse, scale, logit_cap) -> None:
        store, g = self.store, self.store.layout
        grid, lh = (plan.n_items * g.heads,), g.layers * g.heads
        tile_words_kernel[grid](
            self.words, self.n_words, plan.items, plan.lists, plan.sizes, plan.max_blocks, store.counts, layer,
            self.stride, g.heads, self.group, lh, self.classes, rows, 32,
            triton.next_power_of_2(-(-g.block_tokens // 64)), own is None, num_warps=1,
        )  # fmt: skip
        own_o, own_lse = own or (out, part_lse)
        extend_hopper_kernel[grid](
            q, q.stride(0), q.stride(1), k, k.stride(0), k.stride(1), v, v.stride(0), v.stride(1), out, own_o,
            own_lse, part_o, part_lse, part_lse if lse is None else lse, self.words, self.n_words, self.stride,
            plan.items, store.pages, store.table, store.headers, layer, scale, logit_cap, lh, g.heads, self.group,
            g.head_dim, g.head_pages_bf16, g.page_bytes, self.classes, own is None, g.key_mode == TOKEN,
            logit_cap > 0, rows // 2, STAGES, lse is not None, ATTEND_REGS, UNPACK_REGS, num_warps=4,
            maxnreg=MAX_REGS,
        )  # fmt: skip
