"""`plan_thresholds` in one launch: a warp plans one head of a block, without sorting.

In plain torch a plan takes 120 launches for uncompressed blocks and 240 for packed ones, most of them for a few
kilobytes, which would dominate a compaction in a decode step of 8 ms.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ..common.format_class import KEY_BITS, POSITIONS, SCORES, TOKENS, FormatClass, format_class
from ..layout import BlockFormat, PoolLayout
from ..scores.reference import ScoreSampling
from ..store import PageStore
from .thresholds import Thresholds

CHUNK = 8  # slots matched with tokens per iteration
WARPS = 1


@triton.jit
def _tier_evidence(
    score, ceiling, t, pages, row_table, n, TIER: tl.constexpr, page_bytes: tl.constexpr, E: tl.constexpr,
    T: tl.constexpr, SOFF: tl.constexpr, POFF: tl.constexpr, CHUNK: tl.constexpr,
):
    """Scores and tiers `[PP]` of the tokens t in the tier's n slots, added to those of the other tier."""
    for s0 in range(0, n, CHUNK):
        i = s0 + tl.arange(0, CHUNK)
        stored = i < n
        entry = i // T if TIER == 2 else E - 1 - i // T
        page = tl.load(row_table + entry, mask=stored, other=0).to(tl.int64) * page_bytes
        token = tl.load((pages + page + POFF).to(tl.pointer_type(tl.int16)) + i % T, mask=stored, other=-1).to(tl.int32)
        slot_score = tl.load((pages + page + SOFF).to(tl.pointer_type(tl.float32)) + i % T, mask=stored, other=0.0)
        match = (token[None, :] == t[:, None]) & stored[None, :]
        # At most one slot holds a token, so the sum is its score to the last bit.
        score += tl.sum(tl.where(match, slot_score[None, :], 0.0), 1)
        ceiling = tl.maximum(ceiling, tl.max(tl.where(match, TIER, 0), 1))
    return score, ceiling


@triton.jit
def _best(close, member, room):
    """The `room` best members `[PP]`, equals by position; all members if there are fewer.

    The worst chosen value is found bit by bit, because nonnegative floats are ordered as their bits: 31 counts by one
    warp, without the P * P registers of pairwise comparisons.
    """
    key = tl.where(member, close.to(tl.int32, bitcast=True), -1)
    worst = room * 0
    for step in range(31):
        higher = worst | (1 << (30 - step))
        worst = tl.where(tl.sum((key >= higher).to(tl.int32), 0) >= room, higher, worst)
    above = key > worst
    equal = (key == worst).to(tl.int32)
    left = room - tl.sum(above.to(tl.int32), 0)
    return above | ((equal == 1) & (tl.cumsum(equal, 0) <= left))


@triton.jit
def _filled(tiers, ceiling, close, TIER: tl.constexpr, T: tl.constexpr):
    """Tiers with the free slots of a tier's last page given to the best eligible tokens below it."""
    room = (T - tl.sum((tiers == TIER).to(tl.int32), 0) % T) % T
    candidate = (tiers < TIER) & (ceiling >= TIER)
    return tl.where(_best(close, candidate, room), TIER, tiers)


@triton.jit
def _pages(tiers, HIGH: tl.constexpr, LOW: tl.constexpr):
    high, low = tl.sum((tiers == 2).to(tl.int32), 0), tl.sum((tiers == 1).to(tl.int32), 0)
    return (high + HIGH - 1) // HIGH + (low + LOW - 1) // LOW


@triton.jit
def thresholds_kernel(
    pages, table, counts, query_counts, blocks, starts, lengths, prompts, out, alpha_high, alpha_low,
    LH: tl.constexpr, E: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, page_bytes: tl.constexpr,
    SOURCE: tl.constexpr, HIGH: tl.constexpr, LOW: tl.constexpr, WINDOW: tl.constexpr, STRIDE: tl.constexpr,
    DECODE_STRIDE: tl.constexpr, NEAREST: tl.constexpr, CHUNK: tl.constexpr,
):
    """grid (n * LH,). out int8 `[n, LH, P]`. SOURCE: `FormatClass` records of the blocks' tiers. HIGH, LOW: tokens per
    page afterwards. WINDOW, STRIDE, DECODE_STRIDE, NEAREST: as in `ScoreSampling`; WINDOW 0: all queries of a prompt.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.load(blocks + row // LH).to(tl.int64)
    head = block * LH + row % LH
    t = tl.arange(0, PP)
    inside = t < P
    row_table = table + head * E
    if SOURCE[0][KEY_BITS] == 16:
        page = tl.load(row_table + t // SOURCE[0][TOKENS], mask=inside, other=0).to(tl.int64) * page_bytes
        at = (pages + page + SOURCE[0][SCORES]).to(tl.pointer_type(tl.float32)) + t % SOURCE[0][TOKENS]
        score = tl.load(at, mask=inside, other=0.0)
        ceiling = tl.where(inside, 2, 0)
        limit = tl.full([], E, tl.int32)
    else:
        score = tl.zeros([PP], tl.float32)
        ceiling = tl.zeros([PP], tl.int32)
        limit = tl.zeros([], tl.int32)
        for a in tl.static_range(len(SOURCE)):
            n = tl.load(counts + head * 2 + a).to(tl.int32)
            limit += (n + SOURCE[a][TOKENS] - 1) // SOURCE[a][TOKENS]
            score, ceiling = _tier_evidence(
                score, ceiling, t, pages, row_table, n, 2 - a, page_bytes, E, SOURCE[a][TOKENS], SOURCE[a][SCORES],
                SOURCE[a][POSITIONS], CHUNK,
            )
    start = tl.load(starts + row // LH).to(tl.int32)
    prompt = tl.load(prompts + row // LH).to(tl.int32)
    later, end = start + t + NEAREST, start + P
    begin = later
    if WINDOW > 0:
        begin = tl.maximum(later, prompt - WINDOW)
    num_queries = tl.load(query_counts + block)
    num_queries += tl.maximum(tl.minimum(end, prompt) // STRIDE - begin // STRIDE, 0) * STRIDE
    num_queries += tl.maximum(end // DECODE_STRIDE - tl.maximum(later, prompt) // DECODE_STRIDE, 0) * DECODE_STRIDE
    # IEEE divisions give the same plan on every device.
    mean = tl.div_rn(score, tl.maximum(num_queries.to(tl.float32), 1.0))
    length = tl.load(lengths + row // LH)
    position = (start + t).to(tl.float32) + 1.0
    divisor = tl.where(length > 0, length.to(tl.float32), position)
    share = tl.div_rn(tl.full([PP], 1.0, tl.float32), divisor)
    tiers = tl.where(mean >= share * alpha_low, tl.where(mean >= share * alpha_high, 2, 1), 0)
    tiers = tl.minimum(tiers, ceiling)
    close = mean * divisor
    tiers = _filled(tiers, ceiling, close, 2, HIGH)
    tiers = _filled(tiers, ceiling, close, 1, LOW)
    if _pages(tiers, HIGH, LOW) > limit:
        tiers = ceiling
        if _pages(tiers, HIGH, LOW) > limit:
            tiers = tl.where(_best(close, ceiling == 2, limit * HIGH), 2, 0)
    tl.store(out + row * P + t, tiers.to(tl.int8), mask=inside)


@functools.lru_cache
def _source(layout: PoolLayout, block_format: BlockFormat) -> tuple[FormatClass, ...]:
    return tuple(format_class(layout.page(f)) for f in (block_format.high, block_format.low) if f is not None)


def plan_thresholds_triton(
    store: PageStore,
    blocks: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    prompts: torch.Tensor,
    alpha: Thresholds,
    sampling: ScoreSampling,
    *,
    from_format: int,
    to: BlockFormat,
) -> torch.Tensor:
    layout, n = store.layout, blocks.numel()
    out = torch.empty((n, layout.layers, layout.heads, layout.block_tokens), dtype=torch.int8, device=store.device)
    rows, p = layout.layers * layout.heads, layout.block_tokens
    if n:
        thresholds_kernel[(n * rows,)](
            store.pages, store.table, store.counts, store.query_counts, blocks, starts, lengths, prompts, out,
            float(alpha.high), float(alpha.low), rows, layout.head_pages_bf16, p, triton.next_power_of_2(p),
            layout.page_bytes, _source(layout, store.block_formats[from_format]), layout.page(to.high).tokens,
            layout.page(to.low).tokens, sampling.window or 0, sampling.stride, sampling.decode_stride, sampling.nearest,
            CHUNK, num_warps=WARPS,
        )  # fmt: skip
    return out
