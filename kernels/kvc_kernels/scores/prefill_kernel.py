"""Attention scores of a prefill without the attention matrix: column sums from the log-sum-exp of each query.

A program takes several blocks of one KV head. It multiplies a block's keys with the counted queries again, takes
exp2(logit - lse), sums over queries head by head, reduces over the heads of the group, and adds the result to the
scores of the block's slots. If several requests share a block, the program of the first one adds for all, in request
order; `planner.py` lists the blocks once per forward. Every slot thus has one writer: no atomics are needed, and the
result does not depend on the schedule. Decode steps, with one query each, use `decode_kernel.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.format_class import KEY_BITS, SCORES, SIDE, TOKENS, format_classes
from ..common.unpack_kernel import LOG2E, capped, dequant, key_scales
from ..common.upload import upload
from ..extend.body_kernel import load_q, locate
from ..store import PageStore
from .decode_kernel import DecodeScores, StepTuning, recurred
from .planner import BlockPlaces
from .reference import ScoreSampling

INTERPRET = triton.knobs.runtime.interpret
PROGRAMS = 4096  # upper bound per prefill, so that long requests are spread over the device


@triton.jit
def _logits(k, q, scale, cap, FIELDS: tl.constexpr, TILE: tl.constexpr, N: tl.constexpr, CAPPED: tl.constexpr,
            ASM: tl.constexpr):
    """Logits to base 2, fp32 `[TILE, N]`, of keys k and N queries, both in FIELDS pieces of features."""
    s = tl.zeros([TILE, N], tl.float32)
    for f in tl.static_range(FIELDS):
        if ASM:
            s = tl.dot(k[f], tl.trans(q[f]), s)
        else:  # the interpreter multiplies bf16 words as integers
            s = tl.dot(k[f].to(tl.float32), tl.trans(q[f].to(tl.float32)), s)
    if CAPPED:
        return capped(s * scale, cap) * LOG2E
    else:
        return s * (scale * LOG2E)


@triton.jit
def _reduced(total, head, REDUCE: tl.constexpr):
    """Add one head's sums to the reduction over heads."""
    if REDUCE == "max" or REDUCE == "worst" or REDUCE == "recurrence":
        return tl.maximum(total, head)
    elif REDUCE == "sum":
        return total + head
    else:
        return total + head * head


@triton.jit
def _column_sums(
    k, q_rows, lse_rows, q_stride_n, lse_stride, n_queries, position, first_position, scale, cap, dtype: tl.constexpr,
    FIELDS: tl.constexpr, D: tl.constexpr, G: tl.constexpr, TILE: tl.constexpr, QB: tl.constexpr,
    CAPPED: tl.constexpr, NEAREST: tl.constexpr, REDUCE: tl.constexpr, POWER: tl.constexpr, STRIDE: tl.constexpr,
    ALPHA: tl.constexpr, ASM: tl.constexpr,
):
    """fp32 `[TILE]`: sums over queries of their probabilities for keys k (FIELDS pieces `[TILE, D / FIELDS]`), raised
    to POWER and reduced over G heads. `q_rows`, `lse_rows`: first counted query of the first head, at
    `first_position`; further queries follow by STRIDE. NEAREST > 0: number of tokens up to and including a query's
    own that do not count. Queries before all of the keys are skipped, QB at a time: half of a prompt's queries if
    all count.
    """
    result = tl.zeros([TILE], tl.float32)
    n = tl.arange(0, QB)
    begin = n_queries * 0
    if NEAREST:
        ahead = tl.min(tl.where(position < 0, 1 << 30, position), 0) + NEAREST - first_position
        begin = (tl.maximum(ahead, 0) + STRIDE - 1) // STRIDE // QB * QB
    for g in range(G):
        total = tl.zeros([TILE], tl.float32)
        for at in range(begin, n_queries, QB):
            live = at + n < n_queries
            row = (at + n).to(tl.int64) * STRIDE
            q = load_q(q_rows + row * q_stride_n + g * D, live, dtype, D, FIELDS)
            lse = tl.load(lse_rows + row * lse_stride + g, mask=live, other=0.0)
            s = _logits(k, q, scale, cap, FIELDS, TILE, QB, CAPPED, ASM)
            seen = live[None, :] & (position >= 0)[:, None]
            if NEAREST:
                seen = seen & (position[:, None] <= (first_position + (at + n) * STRIDE - NEAREST)[None, :])
            p = tl.where(seen, tl.exp2(s - lse[None, :]), 0.0)
            p = p * p if POWER == 2 else p
            if REDUCE == "recurrence":
                last = first_position + 1 + (at + n) * STRIDE
                total = tl.maximum(total, tl.max(tl.where(p >= ALPHA, last.to(tl.float32)[None, :], 0.0), 1))
            elif REDUCE == "worst":
                total = tl.maximum(total, tl.max(p, 1))
            else:
                total += tl.sum(p, 1)
        result = _reduced(result, total, REDUCE)
    return result


@triton.jit
def _attention_scores(
    k, position, q, q_stride_n, lse, lse_stride, requests, row_blocks, row_stride, block, j, first, last, h, scale,
    cap, dtype: tl.constexpr, FIELDS: tl.constexpr, H: tl.constexpr, D: tl.constexpr, G: tl.constexpr,
    P: tl.constexpr, TILE: tl.constexpr, QB: tl.constexpr, CAPPED: tl.constexpr, NEAREST: tl.constexpr,
    REDUCE: tl.constexpr, POWER: tl.constexpr, STRIDE: tl.constexpr, ALPHA: tl.constexpr, ASM: tl.constexpr,
):
    """fp32 `[TILE]`: scores from all of the requests first .. last whose block in place j is `block`. A summed query
    counts STRIDE times.
    """
    total = tl.zeros([TILE], tl.float32)
    for r in range(first, last + 1):
        # A place after a request's end holds an arbitrary block id.
        tokens = tl.load(requests + r * 4)
        other = tl.load(row_blocks + r * row_stride + j, mask=tokens > j * P, other=-1)
        if other.to(tl.int64) == block:
            start = tl.load(requests + r * 4 + 1).to(tl.int64)
            n_queries = tl.load(requests + r * 4 + 2)
            first_position = tl.load(requests + r * 4 + 3)
            paid = _column_sums(
                k, q + start * q_stride_n + h * (G * D), lse + start * lse_stride + h * G, q_stride_n, lse_stride,
                n_queries, position, first_position, scale, cap, dtype, FIELDS, D, G, TILE, QB, CAPPED, NEAREST,
                REDUCE, POWER, STRIDE, ALPHA, ASM,
            )
            total = tl.maximum(total, paid) if REDUCE == "worst" or REDUCE == "recurrence" else total + paid
    return total if REDUCE == "worst" or REDUCE == "recurrence" else total * STRIDE


@triton.jit
def _add(base, slot, scores, live, SOFF: tl.constexpr, REDUCE: tl.constexpr):
    at = (base + SOFF).to(tl.pointer_type(tl.float32)) + slot
    before = tl.load(at, mask=live, other=0.0)
    if REDUCE == "recurrence":
        after = recurred(before, scores.to(tl.int32), False)
    elif REDUCE == "worst":
        after = tl.maximum(before, scores)
    else:
        after = before + scores
    tl.store(at, after, mask=live)


@triton.jit(do_not_specialize=["layer", "scale", "cap", "row_stride", "capacity"])
def _columns_kernel(
    q, q_stride_n, lse, lse_stride, requests, num_places, listed, capacity, row_blocks, row_stride,
    pages, table, counts, headers, layer, scale, cap,
    L: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, P: tl.constexpr,
    page_bytes: tl.constexpr, CLASSES: tl.constexpr, CAPPED: tl.constexpr,
    TILE: tl.constexpr, QB: tl.constexpr, NEAREST: tl.constexpr, REDUCE: tl.constexpr,
    POWER: tl.constexpr, STRIDE: tl.constexpr, ALPHA: tl.constexpr, ASM: tl.constexpr,
):
    """Any grid: programs take listed blocks, head by head, until the list ends.

    requests int32 `[B, 4]`: tokens including the new ones (0: not sampled), first counted query in q, number of
    counted queries, position of the first. `num_places`, `listed`: see `BlockPlaces`. CLASSES: `FormatClass` records.
    """
    t = tl.arange(0, TILE)
    n = tl.load(num_places)
    for item in range(tl.program_id(0), n * H, tl.num_programs(0)):
        h = item // n
        block_word = tl.load(listed + item % n)
        classes = (block_word & 0xFFF).to(tl.int32)
        if classes > 0:
            request_word = tl.load(listed + capacity + item % n)
            first_request = (request_word >> 32).to(tl.int32)
            last_request = (request_word & 0xFFFFFFFF).to(tl.int32)
            block = block_word >> 32
            j = ((block_word & 0xFFFFFFFF) >> 12).to(tl.int32)
            tokens = tl.load(requests + first_request * 4)
            head = block * (L * H) + layer * H + h
            for c in tl.static_range(len(CLASSES)):
                if (classes >> c) & 1 == 1:
                    row = table + head * E + CLASSES[c][SIDE] * (E - 1)
                    if CLASSES[c][KEY_BITS] == 16:
                        count = tl.minimum(tokens - j * P, P)
                    else:
                        count = tl.load(counts + head * 2 + CLASSES[c][SIDE]).to(tl.int32)
                    for t0 in range(0, count, TILE):
                        live = t0 + t < count
                        if CLASSES[c][KEY_BITS] == 16:
                            base, slot = locate(pages, row, page_bytes, t0, count, t, CLASSES[c][TOKENS], 1, 1)
                            d = tl.arange(0, D)
                            kp = base.to(tl.pointer_type(q.dtype.element_ty)) + slot * D
                            k = (tl.load(kp[:, None] + d[None, :], mask=live[:, None], other=0.0),)
                            scores = _attention_scores(
                                k, tl.where(live, j * P + t0 + t, -1), q, q_stride_n, lse, lse_stride, requests,
                                row_blocks, row_stride, block, j, first_request, last_request, h, scale, cap,
                                q.dtype.element_ty, 1, H, D, G, P, TILE, QB, CAPPED, NEAREST, REDUCE, POWER, STRIDE,
                                ALPHA, ASM,
                            )
                        else:
                            base, slot = locate(
                                pages, row, page_bytes, t0, count, t, CLASSES[c][TOKENS], 1 - 2 * CLASSES[c][SIDE], 16
                            )
                            k = _packed_keys(
                                base, slot, headers + head * (2 * D), live, CLASSES[c][KEY_BITS], D, ASM,
                            )
                            # Packed blocks lie before every query, in stored order, so no token counts as near.
                            scores = _attention_scores(
                                k, tl.where(live, 0, -1), q, q_stride_n, lse, lse_stride, requests, row_blocks,
                                row_stride, block, j, first_request, last_request, h, scale, cap, tl.float16,
                                8 // CLASSES[c][KEY_BITS], H, D, G, P, TILE, QB, CAPPED, 0, REDUCE, POWER, STRIDE,
                                ALPHA, ASM,
                            )
                        _add(base, slot, scores, live, CLASSES[c][SCORES], REDUCE)


@triton.jit
def _packed_keys(
    base, slot, header, live, KB: tl.constexpr, D: tl.constexpr, ASM: tl.constexpr,
):
    """fp16 keys of one tile, 8 / KB pieces `[TILE, D*KB/8]`."""
    DK: tl.constexpr = D * KB // 8
    dk = tl.arange(0, DK)
    codes = tl.load((base + slot * DK)[:, None] + dk[None, :], mask=live[:, None], other=0)
    ks, kz = key_scales(header, KB, D)
    return dequant(codes, ks, kz, KB, ASM)


class AttentionScores:
    """Collection of attention scores: `plan` (a prefill) or `plan_decode` once per forward, then `add` once per layer,
    after the rows are appended and the attention's LSE is known. After `plan_decode`, `add` can be captured in a
    CUDA graph.
    """

    def __init__(
        self,
        store: PageStore,
        *,
        query_heads: int,
        sampling: ScoreSampling,
        max_batch: int = 0,
        max_blocks: int = 0,
        tile: int = 64,
        queries: int = 64,
        warps: int = 4,
        step: StepTuning | None = None,
    ):
        """`max_batch` requests of `max_blocks` blocks: the limits of a decode step, 0 without decode. `tile` keys and
        `queries` queries per product of a prefill.
        """
        layout = store.layout
        if not layout.has_scores:
            raise ValueError("this layout keeps no scores")
        self.store, self.sampling, self.warps = store, sampling, warps
        self.group = query_heads // layout.heads
        self.tile, self.queries = min(tile, triton.next_power_of_2(layout.block_tokens)), queries
        self._classes = format_classes(store)
        self._step = DecodeScores(store, self._classes, self.group, sampling, step or StepTuning())
        self._blocks = BlockPlaces(store)
        steps = torch.arange(max_batch, dtype=torch.int32, device=store.device)
        self._decoding = torch.stack((steps, steps, torch.ones_like(steps), steps), 1)
        self._limits, self._step_listed = (max_batch, max_blocks), self._blocks.room(max_batch * max_blocks)

    def plan(
        self, row_blocks: torch.Tensor, prefix_lens: list[int], extend_lens: list[int],
        prompt_lens: list[int] | None = None
    ) -> None:
        """`row_blocks[B, NB]` int32 on the device, lengths on the host, as in `extend_attention`; does not sync."""
        requests, start, self._stride = [], 0, self.sampling.stride
        for i, (prefix, new) in enumerate(zip(prefix_lens, extend_lens)):
            end = prefix + new
            first = end - self.sampling.counted(end, new, prompt_lens[i] if prompt_lens else end)
            queries = end // self._stride - first // self._stride
            first += -(first + 1) % self._stride
            requests.append((end if queries else 0, start + first - prefix, queries, first))
            start += new
        self._requests, self._rows = upload(requests, self.store.device).view(-1, 4), row_blocks
        places = sum(-(-r[0] // self.store.layout.block_tokens) for r in requests)
        self._decodes, self._listed = False, self._blocks.room(places)
        self._programs = min(PROGRAMS, places * self.store.layout.heads)
        if places:
            self._blocks.update(self._requests, row_blocks, self._listed)

    def plan_decode(self, row_blocks: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Plan a decode step: `row_blocks[B, NB]`, `seq_lens[B]` int32 on the device, static buffers; one query per
        request.

        ValueError for more requests or blocks than the limits.
        """
        n, blocks = row_blocks.shape
        if n > self._limits[0] or blocks > self._limits[1]:
            raise ValueError(f"made for steps of {self._limits} requests and blocks, got {(n, blocks)}")
        self._requests, self._rows = self._decoding[:n], row_blocks
        torch.mul(seq_lens, seq_lens % self.sampling.decode_stride == 0, out=self._requests[:, 0])
        # The host does not know which requests count, so a fixed number of programs shares the list.
        self._decodes, self._listed, self._programs = True, self._step_listed, n * blocks
        self._blocks.update(self._requests, row_blocks, self._listed)

    def add(self, layer: int, q: torch.Tensor, lse: torch.Tensor, *, scale: float, logit_cap: float = 0.0) -> None:
        """Add the probabilities of the counted queries of `q[N, Hq, D]` to the scores of all stored tokens.

        `lse` fp32 `[N, Hq]`, base 2: over the prefix and the new tokens up to the query's own.
        """
        store, g, sampling = self.store, self.store.layout, self.sampling
        if not self._programs:
            return
        if q.stride(1) != g.head_dim or q.stride(2) != 1:
            q = q.contiguous()
        blocks = (self._blocks.num_places, self._listed, self._listed.shape[1], self._rows, self._rows.stride(0))
        if self._decodes:
            self._step.add(layer, q, lse, self._requests, blocks, scale, logit_cap)
            return
        _columns_kernel[(self._programs,)](
            q, q.stride(0), lse, lse.stride(0), self._requests, *blocks, store.pages, store.table, store.counts,
            store.headers, layer, scale, logit_cap, g.layers, g.heads, self.group, g.head_dim, g.head_pages_bf16,
            g.block_tokens, g.page_bytes, self._classes, logit_cap > 0, self.tile, self.queries,
            sampling.nearest, sampling.reduce, sampling.power, self._stride, sampling.alpha, not INTERPRET,
            num_warps=self.warps,
        )  # fmt: skip
