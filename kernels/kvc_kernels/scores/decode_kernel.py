"""Attention scores of one decode step: the columns of K q^T, one query per request.

A program takes one part of a block of one KV head. It folds the block's key scales into the group's queries and
multiplies codes directly, like the decode attention (`unpack_kernel.nested`), so no key is dequantized. `planner.py`
lists the block data once per step, so page ids, counts, headers and queries are requested together, then keys and
scores. The latency of a step with few sampled requests is that of this chain.
"""

# ruff: noqa: RUF005  (the compiler knows no unpacking inside tuples)
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..common.format_class import KEY_BITS, SCORES, SIDE, TILE_PAGES, TOKENS, FormatClass
from ..common.unpack_kernel import CODE_UNIT, LOG2E, capped, nested
from ..decode.body_kernel import _page_pointers, _spread
from ..extend.body_kernel import locate
from ..store import PageStore
from .recurrence import INTERVAL_BITS, LATEST, LONGEST, SEEN
from .reference import ScoreSampling

INTERPRET = triton.knobs.runtime.interpret
PLAIN_TILE = 16  # uncompressed tokens per iteration
_INTERVAL_BITS, _LATEST, _LONGEST, _SEEN = (tl.constexpr(x) for x in (INTERVAL_BITS, LATEST, LONGEST, SEEN))


@dataclass(frozen=True)
class StepTuning:
    """Launch parameters: `tile` keys per product, `tiles` products per program, which folds its queries once for all.
    """

    tile: int = 128
    tiles: int = 1
    warps: int = 2
    programs: int = 8  # CTAs per SM
    max_registers: int = 128


@triton.jit
def _paid(x, b, c, lse, cap, CAPPED: tl.constexpr, EXPONENT: tl.constexpr, REDUCE: tl.constexpr):
    """fp32 `[TILE]`: exp2(EXPONENT * (log2 e * logit - lse)), reduced over heads, of logits x * c + b; b `[1, NQ]`.
    EXPONENT 2 and 4 are the powers of a probability. Heads of padding have an infinite lse."""
    if CAPPED:
        s = capped(x * c + b, cap) * (LOG2E * EXPONENT) - (lse * EXPONENT)[None, :]
    else:
        s = x * (c * (LOG2E * EXPONENT)) + (b * (LOG2E * EXPONENT) - (lse * EXPONENT)[None, :])
    p = tl.exp2(s)
    return tl.max(p, 1) if REDUCE == "max" or REDUCE == "worst" or REDUCE == "recurrence" else tl.sum(p, 1)


@triton.jit
def recurred(words, last, TIMED: tl.constexpr):
    """`recurrence.recurred`, `last` int32."""
    bits = words.to(tl.int32, bitcast=True)
    last = tl.minimum(last, _LATEST)
    before = (bits >> _INTERVAL_BITS) & ((1 << 18) - 1)
    interval = bits & _LONGEST
    if TIMED:
        distance = tl.minimum(last - before, _LONGEST)
        interval = tl.where(bits != 0, tl.maximum(interval, distance), 0)
    after = _SEEN | (tl.maximum(before, last) << _INTERVAL_BITS) | interval
    return tl.where(last > 0, after, bits).to(tl.float32, bitcast=True)


@triton.jit
def _collected(before, paid, tokens, REDUCE: tl.constexpr, COUNTS: tl.constexpr, ALPHA: tl.constexpr):
    """Scores after the query of a request of `tokens` tokens. A summed query counts COUNTS times."""
    if REDUCE == "recurrence":
        return recurred(before, tl.where(paid >= ALPHA, tokens, 0), True)
    elif REDUCE == "worst":
        return tl.maximum(before, paid)
    else:
        return before + paid * COUNTS


@triton.jit
def _materialized(x, ASM: tl.constexpr):
    """x, materialized in one layout before the compiler converts it to another. Otherwise the compiler converts each
    load on its own, through shared memory, and every load waits for the one before.
    """
    if ASM:
        PACK: tl.constexpr = 32 // x.dtype.primitive_bitwidth
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=PACK)
    else:
        return x


@triton.jit
def _fold(x, scales, zeros, KB: tl.constexpr, ASM: tl.constexpr):
    """Queries x with a block's key scales folded in, fp16 `[D*KB/8, NQ]` for each tensor of `nested`, and fp32 `[NQ]` q
    . zero. All `[D*KB/8, NQ]`, the highest field first.
    """
    NKF: tl.constexpr = 8 // KB
    q = ()
    b = tl.zeros([x[0].shape[1]], tl.float32)
    above = tl.zeros(x[0].shape, tl.float16)
    for k in tl.static_range(NKF):
        scaled = (x[k].to(tl.float32) * (1.0 / (1 << (KB * (NKF - 1 - k))))).to(tl.float16)
        b += tl.sum(x[k].to(tl.float32) * zeros[k].to(tl.float32), 0)
        scaled = scaled * scales[k]
        q = q + (_materialized(scaled - above, ASM),)
        above = scaled
    return q, b


@triton.jit
def _packed_tiles(
    q_row, lse, row, counts, header, first, tokens, pages, page_bytes, scale, cap,
    KB: tl.constexpr, T: tl.constexpr, SIDE: tl.constexpr, SOFF: tl.constexpr,
    SPAN: tl.constexpr, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr, NQ: tl.constexpr, TILE: tl.constexpr,
    TILES: tl.constexpr, CAPPED: tl.constexpr, EXPONENT: tl.constexpr,
    REDUCE: tl.constexpr, COUNTS: tl.constexpr, ALPHA: tl.constexpr, ASM: tl.constexpr,
):
    """Add one query's probabilities, times COUNTS, to the scores of a block's packed tokens `first`, ..., TILES tiles.

    `q_row`: of the first head; `lse` fp32 `[NQ]`; `row`: first table entry; `counts`: the head's tokens of this side;
    `tokens`: of the request.
    All independent loads come before the first use of one of them.
    """
    DK: tl.constexpr = D * KB // 8
    NKF: tl.constexpr = 8 // KB
    t = tl.arange(0, TILE)
    dk = tl.arange(0, DK)
    g = tl.arange(0, NQ)
    ids = ()
    for k in tl.static_range(TILES * SPAN):
        # Entries after a head's pages are valid page ids, too.
        e = (first + k // SPAN * TILE) // T + k % SPAN
        ids = ids + (tl.load(row + (1 - 2 * SIDE) * e, mask=e * T < P, other=0),)
    count = tl.load(counts).to(tl.int32)
    x = ()
    scales = ()
    zeros = ()
    for k in tl.static_range(NKF):
        # The highest field first; see `nested`. Headers are broadcast to all heads, in the layout of the queries.
        feature = ((NKF - 1 - k) * DK + dk)[:, None]
        x = x + (tl.load(q_row + g[None, :] * D + feature, mask=(g < G)[None, :], other=0.0),)
        scales = scales + (tl.load(header + g[None, :] * 0 + feature),)
        zeros = zeros + (tl.load(header + D + g[None, :] * 0 + feature),)
    score = ()
    before = ()
    codes = ()
    for i in tl.static_range(TILES):
        t0 = first + i * TILE
        live = t < count - t0
        tile_ids = ()
        for k in tl.static_range(SPAN):
            tile_ids = tile_ids + (ids[i * SPAN + k],)
        base, at, slots = _page_pointers(pages, tile_ids, page_bytes, t0, t, TILE, T, SPAN, 16)
        score = score + ((base + SOFF).to(tl.pointer_type(tl.float32)) + at + slots,)
        before = before + (tl.load(score[i], mask=live, other=0.0),)
        rows = (_spread(base, SPAN, 1) + at * DK) + (slots[:, None] * DK + dk[None, :])
        if SPAN == 1:
            codes = codes + (tl.load(rows),)
        else:
            codes = codes + (tl.load(rows, mask=live[:, None], other=0),)
    q, b = _fold(x, scales, zeros, KB, ASM)
    c = scale * CODE_UNIT
    for i in tl.static_range(TILES):
        kf = nested(codes[i], KB, ASM)
        s = tl.zeros([TILE, NQ], tl.float32)
        for k in tl.static_range(NKF):
            s = tl.dot(kf[k], q[k], s)
        grid = c * (255 // ((1 << KB) - 1))
        paid = _paid(s, (b * scale)[None, :], grid, lse, cap, CAPPED, EXPONENT, REDUCE)
        after = _collected(_materialized(before[i], ASM), paid, tokens, REDUCE, COUNTS, ALPHA)
        tl.store(score[i], after, mask=t < count - first - i * TILE)


@triton.jit
def _plain_block(
    q_row, lse, row, count, far, tokens, part, pages, page_bytes, scale, cap,
    T: tl.constexpr, SOFF: tl.constexpr, G: tl.constexpr, D: tl.constexpr, NQ: tl.constexpr, TILE: tl.constexpr,
    PARTS: tl.constexpr, CAPPED: tl.constexpr, EXPONENT: tl.constexpr, REDUCE: tl.constexpr, COUNTS: tl.constexpr,
    ALPHA: tl.constexpr, ASM: tl.constexpr,
):
    """`_packed_tiles` for an uncompressed block. The first `far` of its `count` tokens are far enough from the query.
    """
    t = tl.arange(0, TILE)
    d = tl.arange(0, D)
    g = tl.arange(0, NQ)
    q = tl.load(q_row + g[None, :] * D + d[:, None], mask=(g < G)[None, :], other=0.0)
    if not ASM:  # the interpreter multiplies bf16 words as integers
        q = q.to(tl.float32)
    for t0 in tl.range(part * TILE, tl.minimum(count, far), PARTS * TILE, num_stages=1):
        base, slot = locate(pages, row, page_bytes, t0, count, t, T, 1, 1)
        live = t0 + t < tl.minimum(count, far)
        k = tl.load((base.to(tl.pointer_type(q_row.dtype.element_ty)) + slot * D)[:, None] + d[None, :])
        score = (base + SOFF).to(tl.pointer_type(tl.float32)) + slot
        before = tl.load(score, mask=live, other=0.0)
        s = tl.dot(k.to(q.dtype), q)
        paid = _paid(s, tl.zeros([1, NQ], tl.float32), scale, lse, cap, CAPPED, EXPONENT, REDUCE)
        tl.store(score, _collected(before, paid, tokens, REDUCE, COUNTS, ALPHA), mask=live)


@triton.jit(do_not_specialize=["layer", "scale", "cap", "row_stride", "capacity"])
def _step_kernel(
    q, q_stride_n, lse, lse_stride, requests, num_places, listed, capacity, row_blocks, row_stride,
    pages, table, counts, headers, layer, scale, cap,
    L: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, P: tl.constexpr,
    page_bytes: tl.constexpr, CLASSES: tl.constexpr, CAPPED: tl.constexpr,
    NQ: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, PLAIN_TILE: tl.constexpr, NEAREST: tl.constexpr,
    REDUCE: tl.constexpr, EXPONENT: tl.constexpr, STRIDE: tl.constexpr, ALPHA: tl.constexpr, ASM: tl.constexpr,
):
    """Any grid: programs take parts of listed blocks, head by head, until the list ends.

    `num_places`, `listed`, `requests`: see `BlockPlaces`; one query per request, its last token. CLASSES:
    `FormatClass` records.
    """
    PARTS: tl.constexpr = (P + TILE * TILES - 1) // (TILE * TILES)
    g = tl.arange(0, NQ)
    item = tl.program_id(0)
    # Words are read ahead, possibly beyond the end of the list.
    following = tl.minimum(item // (H * PARTS), capacity - 1)
    block_word = tl.load(listed + following)
    request_word = tl.load(listed + capacity + following)
    n = tl.load(num_places) * (H * PARTS)
    while item < n:
        part = item % PARTS
        h = item // PARTS % H
        block = block_word >> 32
        place = ((block_word & 0xFFFFFFFF) >> 12).to(tl.int32)
        classes = (block_word & 0xFFF).to(tl.int32)
        first_request = (request_word >> 32).to(tl.int32)
        last_request = tl.where(classes > 0, (request_word & 0xFFFFFFFF).to(tl.int32), -1)
        head = block * (L * H) + layer * H + h
        item += tl.num_programs(0)
        following = tl.minimum(item // (H * PARTS), capacity - 1)
        block_word = tl.load(listed + following)
        request_word = tl.load(listed + capacity + following)
        for r in range(first_request, last_request + 1):
            # Requests that share a block have it in the same place. After a request's end, block ids are arbitrary.
            holds = r == first_request
            if r > first_request:
                reaches = tl.load(requests + r * 4) > place * P
                holds = tl.load(row_blocks + r * row_stride + place, mask=reaches, other=-1) == block
            if holds:
                query = first_request.to(tl.int64) + (r - first_request)
                q_row = q + query * q_stride_n + h * (G * D)
                paid = tl.load(lse + query * lse_stride + h * G + g, mask=g < G, other=float("inf"))
                for c in tl.static_range(len(CLASSES)):
                    if (classes >> c) & 1 == 1:
                        if CLASSES[c][KEY_BITS] == 16:
                            tokens = tl.load(requests + r * 4)
                            start = place * P
                            _plain_block(
                                q_row, paid, table + head * E, tl.minimum(tokens - start, P),
                                tokens - NEAREST - start, tokens, part, pages, page_bytes, scale, cap,
                                CLASSES[c][TOKENS], CLASSES[c][SCORES], G, D, NQ, PLAIN_TILE, PARTS, CAPPED, EXPONENT,
                                REDUCE, STRIDE, ALPHA, ASM,
                            )
                        else:
                            # Packed blocks lie before every query, in stored order, so no token counts as near.
                            now = tl.load(requests + r * 4) if REDUCE == "recurrence" else 0
                            _packed_tiles(
                                q_row, paid, table + head * E + CLASSES[c][SIDE] * (E - 1),
                                counts + head * 2 + CLASSES[c][SIDE], headers + head * (2 * D), part * (TILE * TILES),
                                now, pages, page_bytes, scale, cap, CLASSES[c][KEY_BITS], CLASSES[c][TOKENS],
                                CLASSES[c][SIDE], CLASSES[c][SCORES], CLASSES[c][TILE_PAGES], G,
                                D, P, NQ, TILE, TILES, CAPPED, EXPONENT, REDUCE, STRIDE, ALPHA, ASM,
                            )
                if last_request > first_request:
                    # The next request adds to the same scores, possibly from other threads.
                    tl.debug_barrier()


class DecodeScores:
    """Launch of the score kernel of one decode step."""

    def __init__(
        self, store: PageStore, classes: tuple[FormatClass, ...], group: int, sampling: ScoreSampling,
        tuning: StepTuning
    ):
        """`classes`: the format classes of the store; `tile_pages` is set here."""
        layout, p = store.layout, store.layout.block_tokens
        self.store, self.group, self.sampling, self.tuning = store, group, sampling, tuning
        self.tile = min(tuning.tile, triton.next_power_of_2(p))
        self.tiles = min(tuning.tiles, triton.cdiv(p, self.tile))
        self.classes = tuple(c._replace(tile_pages=self._span(c.tokens)) for c in classes)
        self.programs = 8
        if store.device.type == "cuda":
            self.programs = tuning.programs * torch.cuda.get_device_properties(store.device).multi_processor_count
        self.options = {"num_warps": tuning.warps}
        if tuning.max_registers and not INTERPRET and layout.head_dim <= 128 and group <= 8:
            self.options["maxnreg"] = tuning.max_registers

    def _span(self, tokens: int) -> int:
        tile = self.tile
        if tokens % tile == 0:
            return 1
        return tile // tokens if tile % tokens == 0 else (tile + tokens - 2) // tokens + 1

    def add(
        self, layer: int, q: torch.Tensor, lse: torch.Tensor, requests: torch.Tensor, blocks: tuple, scale: float,
        cap: float,
    ) -> None:  # fmt: skip
        """Add one layer's scores. `blocks`: number of places, list, its length, block ids of each request and their
        stride.
        """
        store, g, sampling = self.store, self.store.layout, self.sampling
        exponent = sampling.power * (2 if sampling.reduce == "squares" else 1)
        _step_kernel[(self.programs,)](
            q, q.stride(0), lse, lse.stride(0), requests, *blocks, store.pages, store.table, store.counts,
            store.headers, layer, scale, cap, g.layers, g.heads, self.group, g.head_dim, g.head_pages_bf16,
            g.block_tokens, g.page_bytes, self.classes, cap > 0,
            max(8, triton.next_power_of_2(self.group)), self.tile, self.tiles, PLAIN_TILE,
            sampling.nearest, sampling.reduce, exponent, sampling.decode_stride, sampling.alpha, not INTERPRET,
            **self.options,
        )  # fmt: skip
