"""Decode attention whose programs are dealt to KV heads by load (see `decode_attention_triton`): plan, launch, merge.

A program belongs to one head. How many a head gets, and where its lists of blocks are cut, follows from weights
int32 `[L, H, C]`: the time of a block of class C at that layer and head, in units of 1/256 of a tile, as found in the
counts of a sample of the step's blocks. All cuts are integer arithmetic on those and on block counts, done alike by the
programs and by the merge: there is no list of work items.

Of list i = request * C + class, its blocks laid end to end with those of the lists before, a head's program j holds the
blocks whose middle lies in its part of the cost. Its result for that list goes to row pid + head * lists + i: from one
result of a head to the next, the program or the list is another, so that rows are never shared.

EXACT: the plan reads every count of the step instead, and stores where each program begins on the line of all lists,
int32 `cuts[L, programs + 1]`, in blocks. The programs with a list's first and last block tell the merge which they are.

An alternative to `DecodeAttention` for blocks of uneven heads; not served until it was timed (bench/kernels/NOTES.md).
"""

# ruff: noqa: RUF005  (the compiler knows no unpacking inside tuples)
from __future__ import annotations

import torch
import triton
import triton.language as tl

from .decode_attention_triton import INTERPRET, DecodeAttention, _packed_program, _plain_program
from .decode_share_plan_triton import SharePlan, _part_of
from .unpack_triton import NEG


@triton.jit
def _border(x, start, weight, n):
    """First block of a list that starts at cost `start` whose middle is at cost `x` or behind it."""
    v = 2 * (x - start) - weight
    return tl.where(v <= 0, 0, tl.minimum((v + 2 * weight - 1) // (2 * weight), n))


@triton.jit(do_not_specialize=["NB", "layer", "cap", "scale"])
def _share_kernel(
    q_ptr, q_stride_b, q_stride_h, part_o, part_ml, scratch, weights, before, shares, cuts, ends, lists,
    pages, table, counts, headers, NB, layer, scale, cap,
    L: tl.constexpr, H: tl.constexpr, G: tl.constexpr, NQ: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    P: tl.constexpr, page_bytes: tl.constexpr, CLASSES: tl.constexpr, CHUNK: tl.constexpr,
    SCRATCH: tl.constexpr, WORDS: tl.constexpr, TOKEN_KEYS: tl.constexpr, CAPPED: tl.constexpr, WARPS: tl.constexpr,
    ASM: tl.constexpr, MB: tl.constexpr, WIDTH: tl.constexpr, HP: tl.constexpr, EARLY: tl.constexpr,
    EXACT: tl.constexpr,
):
    """grid (programs,). part_o fp32 `[programs + H * MB * C, G, D]`, part_ml fp32 `[.., G, 2]`."""
    NC: tl.constexpr = len(CLASSES)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    words = scratch + pid.to(tl.int64) * SCRATCH
    qz = (words + WORDS).to(tl.pointer_type(tl.float32))
    tile_pages = (words + WORDS + CHUNK * NQ // 2).to(tl.pointer_type(tl.int32))
    every = tl.arange(0, WIDTH)
    heads = tl.arange(0, HP)
    share = shares + layer * (4 * H)
    firsts = tl.load(share + heads, mask=heads < H, other=1 << 30)
    n_before = ()
    for c in tl.static_range(NC):
        n_before = n_before + (tl.load(before + c * (MB + 1) + every, mask=every < MB, other=0),)
    h = tl.sum((firsts <= pid).to(tl.int32), 0) - 1
    j = pid - tl.load(share + h)
    if j < tl.load(share + H + h):
        if EXACT:
            begin = tl.load(cuts + layer * (tl.num_programs(0) + 1) + pid)
            end = tl.load(cuts + layer * (tl.num_programs(0) + 1) + pid + 1)
            if j + 1 == tl.load(share + H + h):
                end = 0
                for c in tl.static_range(NC):
                    end += tl.load(before + c * (MB + 1) + MB)
        else:
            width = tl.load(share + 2 * H + h)
            wider = tl.load(share + 3 * H + h)
            begin = j * width + tl.minimum(j, wider)
            end = begin + width + (j < wider).to(tl.int32)
        head = (layer * H + h).to(tl.int64)
        starts = tl.where(every < MB, 0, 1 << 30)
        for c in tl.static_range(NC):
            starts += (1 if EXACT else tl.load(weights + head * NC + c)) * n_before[c]
        first_request = tl.sum((starts <= begin).to(tl.int32), 0) - 1
        last_request = tl.sum((starts < end).to(tl.int32), 0) - 1
        g = tl.arange(0, NQ)
        for step in range(last_request - first_request + 1):
            request = first_request + step
            q_row = q_ptr + request.to(tl.int64) * q_stride_b + (h * G + g) * q_stride_h
            start = tl.zeros([], tl.int32)
            for c in tl.static_range(NC):
                start += (1 if EXACT else tl.load(weights + head * NC + c)) * tl.load(before + c * (MB + 1) + request)
            for c in tl.static_range(NC):
                weight = 1 if EXACT else tl.load(weights + head * NC + c)
                at = before + c * (MB + 1) + request
                size = tl.load(at + 1) - tl.load(at)
                lo = _border(begin, start, weight, size)
                blocks = _border(end, start, weight, size) - lo
                start += size * weight
                if blocks > 0:
                    entries = lists + (request * NC + c).to(tl.int64) * NB + lo
                    part = (pid + (h * MB + request) * NC + c).to(tl.int64) * G + g
                    out = part_o + part * D
                    ml = part_ml + part * 2
                    if EXACT:
                        at_end = ends + ((h * MB + request) * NC + c) * 2
                        if lo == 0:
                            tl.store(at_end, pid)
                        if lo + blocks == size:
                            tl.store(at_end + 1, pid)
                    if CLASSES[c][0] == 16:
                        _plain_program(
                            q_row, g, out, ml, words, tile_pages, entries, blocks, pages, table, head * E, scale, cap,
                            page_bytes, L * H * E, G, NQ, D, P, CLASSES[c][2], CLASSES[c][8], CLASSES[c][5], CHUNK,
                            CAPPED, CLASSES[c][7], CLASSES[c][9], WARPS, ASM,
                        )
                    else:
                        _packed_program(
                            q_row, g, out, ml, words, tile_pages, qz, entries, blocks, pages, table, counts, headers,
                            head, scale, cap, page_bytes, L * H, E, G, NQ, D, P, CLASSES[c][0], CLASSES[c][1],
                            CLASSES[c][2], CLASSES[c][8], CLASSES[c][3], CLASSES[c][4], CLASSES[c][5], CLASSES[c][6],
                            CHUNK, TOKEN_KEYS, CAPPED, CLASSES[c][7], CLASSES[c][9], WARPS, ASM, CLASSES[c][10],
                        )


@triton.jit(do_not_specialize=["layer"])
def _share_merge_kernel(
    part_o, part_ml, weights, before, shares, ends, layer, out, out_lse,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, MB: tl.constexpr, NC: tl.constexpr, STEP: tl.constexpr,
    LSE: tl.constexpr, EARLY: tl.constexpr, EXACT: tl.constexpr,
):
    """grid (B, H * G). As `_merge_kernel`; the rows of a request and head follow from the cuts.

    EARLY: may start before the programs that it follows have ended, and waits for them itself.
    """
    b = tl.program_id(0)
    hq = tl.program_id(1)
    h = hq // G
    g = hq % G
    place = (h * MB + b) * NC
    start = tl.zeros([], tl.int32)
    if EXACT:
        if EARLY:
            tl.extra.cuda.gdc_wait()
    else:
        share = shares + layer * (4 * H) + h
        width = tl.maximum(tl.load(share + 2 * H), 1)
        wider = tl.load(share + 3 * H)
        place += tl.load(share)
        for c in tl.static_range(NC):
            start += tl.load(weights + (layer * H + h) * NC + c) * tl.load(before + c * (MB + 1) + b)
    begins = ()
    stops = ()
    begin = tl.full([], 1 << 30, tl.int32)
    end = tl.zeros([], tl.int32)
    for c in tl.static_range(NC):
        at = before + c * (MB + 1) + b
        size = tl.load(at + 1) - tl.load(at)
        some = size > 0
        if EXACT:
            top = tl.load(ends + (place + c) * 2, mask=some, other=0)
            bottom = tl.load(ends + (place + c) * 2 + 1, mask=some, other=0)
        else:
            weight = tl.load(weights + (layer * H + h) * NC + c)
            top = _part_of(start + weight // 2, width, wider)
            bottom = _part_of(start + (2 * size - 1) * weight // 2, width, wider)
            start += size * weight
        mine = tl.where(some, place + c + top, 1 << 30)
        beyond = tl.where(some, place + c + bottom + 1, 0)
        begins = begins + (mine,)
        stops = stops + (beyond,)
        begin = tl.minimum(begin, mine)
        end = tl.maximum(end, beyond)
    d = tl.arange(0, D)
    i = tl.arange(0, STEP)
    if EARLY and not EXACT:
        tl.extra.cuda.gdc_wait()
    top_m = tl.full([], NEG, tl.float32)
    total = tl.zeros([], tl.float32)
    acc = tl.zeros([D], tl.float32)
    for at in range(begin, end, STEP):
        r = at + i
        ok = r < 0
        for c in tl.static_range(NC):
            ok = ok | ((r >= begins[c]) & (r < stops[c]))
        row = r.to(tl.int64) * G + g
        m = tl.load(part_ml + row * 2, mask=ok, other=NEG)
        l = tl.load(part_ml + row * 2 + 1, mask=ok, other=0.0)
        o = tl.load(part_o + row[:, None] * D + d[None, :], mask=ok[:, None], other=0.0)
        m_new = tl.maximum(top_m, tl.max(m, 0))
        w = tl.exp2(m - m_new)
        keep = tl.exp2(top_m - m_new)
        total = total * keep + tl.sum(w * l, 0)
        acc = acc * keep + tl.sum(o * w[:, None], 0)
        top_m = m_new
    result = acc / tl.where(total > 0, total, 1.0)
    tl.store(out + (b * (H * G) + hq).to(tl.int64) * D + d, result.to(out.dtype.element_ty))
    if LSE:
        lse = tl.where(total > 0, top_m + tl.log2(tl.where(total > 0, total, 1.0)), NEG)
        tl.store(out_lse + b * (H * G) + hq, lse)


class ShareDecodeAttention(DecodeAttention):
    _planned = (*DecodeAttention._planned[:3], *(torch.int32,) * 5, torch.int64)

    def __init__(self, store, *, tile_cost=lambda c: 1.0, early: bool = False, exact: bool = False, max_batch, **kw):
        """`tile_cost(class)`: relative time of a tile. `early`: the merge is launched ahead (Hopper and later).

        `exact`: every count is read for the plan, not a sample of each list.
        """
        layout = store.layout
        self._exact = exact
        self._max_batch = max_batch
        super().__init__(store, max_batch=max_batch, early=early and not INTERPRET, **kw)
        old, dev, nc = self._plan, store.device, len(self._classes)
        plan = SharePlan(store, max_batch, old.max_blocks, columns=old.columns)
        plan.exact = exact
        plan.describe(self._classes, layout.block_tokens, tile_cost)
        plan.head_weights = torch.zeros((layout.layers, layout.heads, nc), dtype=torch.int32, device=dev)
        plan.shares = torch.zeros((layout.layers, 4, layout.heads), dtype=torch.int32, device=dev)
        plan.before = torch.zeros((nc, max_batch + 1), dtype=torch.int32, device=dev)
        programs = plan.columns * layout.heads
        plan.cuts = torch.zeros((layout.layers, programs + 1), dtype=torch.int32, device=dev)
        plan.ends = torch.zeros((layout.heads, max_batch, nc, 2), dtype=torch.int32, device=dev)
        plan.line = torch.zeros(max_batch * nc * plan.max_blocks if exact else 1, dtype=torch.int64, device=dev)
        self._plan = plan

    @property
    def _kernel(self):
        return _share_kernel

    def _constants(self, capped: bool) -> dict:
        return super()._constants(capped) | {
            "MB": self._max_batch,
            "WIDTH": triton.next_power_of_2(self._max_batch),
            "HP": triton.next_power_of_2(self.store.layout.heads),
            "EARLY": self._early,
            "EXACT": self._exact,
        }

    def run(self, layer, q, *, scale, logit_cap=0.0, out=None, lse=None):
        store, plan, heads = self.store, self._plan, self.store.layout.heads
        if out is None:
            out = torch.empty_like(q)
        if q.shape[0] == 0:
            return out
        programs, c = plan.columns * heads, self._constants(logit_cap > 0)
        _share_kernel[(programs,)](
            q, q.stride(0), q.stride(1), self._part_o, self._part_ml, self._scratch, plan.head_weights, plan.before,
            plan.shares, plan.cuts, plan.ends, plan.lists, store.pages, store.table, store.counts, store.headers,
            plan.max_blocks, layer, scale, logit_cap, **c,
        )  # fmt: skip
        _share_merge_kernel[(q.shape[0], q.shape[1])](
            self._part_o, self._part_ml, plan.head_weights, plan.before, plan.shares, plan.ends, layer, out,
            self._part_ml if lse is None else lse, heads, self.group, store.layout.head_dim, c["MB"],
            len(self._classes), 8, lse is not None, self._early, self._exact, num_warps=1,
            **({"launch_pdl": True} if self._early else {}),
        )  # fmt: skip
        return out
