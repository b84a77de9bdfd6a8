"""Attention that tokens receive, without the attention matrix: column sums from the log-sum-exp of each query.

One program owns some blocks of one KV head: it multiplies a block's keys with the observing queries again, takes
exp2(logit - lse), sums over queries head by head, reduces over the heads of the group, and adds the result to the
scores of the block's slots. Of several requests that share a block, the program of the first one adds for all, in
their order; who that is, and who observes at all, is worked out once a forward. So no slot has two writers, no atomics
are needed and no order decides.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..layout import TOKEN
from ..store import PageStore
from .decode_plan_triton import ladder_classes
from .extend_body_triton import load_q, locate
from .observe import Observe
from .unpack_triton import LOG2E, capped, dequant, key_scales

INTERPRET = triton.knobs.runtime.interpret
PROGRAMS = 4096  # about as many an extend, so that long requests are spread over the device
# In a decode step: programs a multiprocessor, parts of a request's blocks, and warps.
STEP_PROGRAMS, STEP_SPLITS, STEP_WARPS = 8, 64, 1


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
    """Add one head's sums to what is reduced over heads."""
    if REDUCE == "max":
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
    ASM: tl.constexpr,
):
    """fp32 `[TILE]`: sum over queries of the probability paid to keys k (FIELDS pieces `[TILE, D / FIELDS]`), raised to
    POWER, reduced over G heads. `q_rows`, `lse_rows`: the first observing query of the first head, at
    `first_position`; the others follow by STRIDE. NEAREST > 0: of a query's tokens up to its own, so many are left out.
    """
    result = tl.zeros([TILE], tl.float32)
    n = tl.arange(0, QB)
    for g in range(G):
        total = tl.zeros([TILE], tl.float32)
        for at in range(0, n_queries, QB):
            live = at + n < n_queries
            row = (at + n).to(tl.int64) * STRIDE
            q = load_q(q_rows + row * q_stride_n + g * D, live, dtype, D, FIELDS)
            lse = tl.load(lse_rows + row * lse_stride + g, mask=live, other=0.0)
            s = _logits(k, q, scale, cap, FIELDS, TILE, QB, CAPPED, ASM)
            seen = live[None, :] & (position >= 0)[:, None]
            if NEAREST:
                seen = seen & (position[:, None] <= (first_position + (at + n) * STRIDE - NEAREST)[None, :])
            p = tl.where(seen, tl.exp2(s - lse[None, :]), 0.0)
            total += tl.sum(p * p if POWER == 2 else p, 1)
        result = _reduced(result, total, REDUCE)
    return result


@triton.jit
def _one_query(
    k, q_rows, lse_rows, position, first_position, scale, cap, dtype: tl.constexpr, FIELDS: tl.constexpr,
    D: tl.constexpr, G: tl.constexpr, TILE: tl.constexpr, NQ: tl.constexpr, CAPPED: tl.constexpr,
    NEAREST: tl.constexpr, REDUCE: tl.constexpr, POWER: tl.constexpr, ASM: tl.constexpr,
):
    """`_column_sums` of a single query, whose G heads are the columns of one product; NQ: G padded."""
    g = tl.arange(0, NQ)
    q = load_q(q_rows + g * D, g < G, dtype, D, FIELDS)
    lse = tl.load(lse_rows + g, mask=g < G, other=0.0)
    s = _logits(k, q, scale, cap, FIELDS, TILE, NQ, CAPPED, ASM)
    seen = (g < G)[None, :] & (position >= 0)[:, None]
    if NEAREST:
        seen = seen & (position <= first_position - NEAREST)[:, None]
    p = tl.where(seen, tl.exp2(s - lse[None, :]), 0.0)
    if POWER == 2:
        p = p * p
    if REDUCE == "max":
        return tl.max(p, 1)
    elif REDUCE == "sum":
        return tl.sum(p, 1)
    else:
        return tl.sum(p * p, 1)


@triton.jit
def _received(
    k, position, q, q_stride_n, lse, lse_stride, requests, row_blocks, row_stride, block, j, first, last, h, scale,
    cap, dtype: tl.constexpr, FIELDS: tl.constexpr, H: tl.constexpr, D: tl.constexpr, G: tl.constexpr,
    P: tl.constexpr, TILE: tl.constexpr, QB: tl.constexpr, NQ: tl.constexpr, CAPPED: tl.constexpr,
    NEAREST: tl.constexpr, REDUCE: tl.constexpr, POWER: tl.constexpr, STRIDE: tl.constexpr, ASM: tl.constexpr,
):
    """fp32 `[TILE]`: what all of the requests first .. last pay, whose block in place j is `block`; NQ 0: any number of
    queries, QB at a time, else one query a request. A query counts STRIDE times."""
    total = tl.zeros([TILE], tl.float32)
    for r in range(first, last + 1):
        # A place behind a request's end names any block.
        tokens = tl.load(requests + r * 4)
        other = tl.load(row_blocks + r * row_stride + j, mask=tokens > j * P, other=-1)
        if other.to(tl.int64) == block:
            start = tl.load(requests + r * 4 + 1).to(tl.int64)
            n_queries = tl.load(requests + r * 4 + 2)
            first_position = tl.load(requests + r * 4 + 3)
            q_rows = q + start * q_stride_n + h * (G * D)
            lse_rows = lse + start * lse_stride + h * G
            if NQ:
                total += _one_query(
                    k, q_rows, lse_rows, position, first_position, scale, cap, dtype, FIELDS, D, G, TILE, NQ, CAPPED,
                    NEAREST, REDUCE, POWER, ASM,
                )
            else:
                total += _column_sums(
                    k, q_rows, lse_rows, q_stride_n, lse_stride, n_queries, position, first_position, scale, cap,
                    dtype, FIELDS, D, G, TILE, QB, CAPPED, NEAREST, REDUCE, POWER, STRIDE, ASM,
                )
    return total * STRIDE


@triton.jit(do_not_specialize=["row_stride", "n_requests", "owner_stride"])
def _owners_kernel(
    requests, row_blocks, row_stride, n_requests, order, owners, owner_stride,
    P: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr,
):
    """grid (B, places / STEP). order int32 `[1 + B]`: how many requests observe, and which. owners int32 `[B, NB]`: the
    last request that holds the block in this place, where this request is the first that does, else -1. Shared blocks
    hold a common prefix, so their places agree.
    """
    me = tl.program_id(0)
    mine = tl.load(requests + me * 4)
    j = tl.program_id(1) * STEP + tl.arange(0, STEP)
    held = j * P < mine
    block = tl.load(row_blocks + me.to(tl.int64) * row_stride + j, mask=held, other=-1)
    first = tl.zeros([STEP], tl.int32) + n_requests
    last = tl.zeros([STEP], tl.int32) - 1
    before = me * 0
    observing = me * 0
    for at in range(0, n_requests, ROWS):
        r = at + tl.arange(0, ROWS)
        tokens = tl.load(requests + r * 4, mask=r < n_requests, other=0)
        before += tl.sum(((tokens > 0) & (r < me)).to(tl.int32), 0)
        observing += tl.sum((tokens > 0).to(tl.int32), 0)
        # A place behind a request's end names any block.
        live = (tokens[:, None] > (j * P)[None, :]) & held[None, :]
        other = tl.load(row_blocks + (r.to(tl.int64) * row_stride)[:, None] + j[None, :], mask=live, other=-1)
        same = live & (other == block[None, :])
        first = tl.minimum(first, tl.min(tl.where(same, r[:, None], n_requests), 0))
        last = tl.maximum(last, tl.max(tl.where(same, r[:, None], -1), 0))
    tl.store(owners + me.to(tl.int64) * owner_stride + j, tl.where(first == me, last, -1), mask=held)
    if tl.program_id(1) == 0:
        if mine > 0:
            tl.store(order + 1 + before, me)
        if me == 0:
            tl.store(order, observing)


@triton.jit
def _add(base, slot, received, live, SOFF: tl.constexpr):
    at = (base + SOFF).to(tl.pointer_type(tl.float32)) + slot
    tl.store(at, tl.load(at, mask=live, other=0.0) + received, mask=live)


@triton.jit(do_not_specialize=["layer", "scale", "cap", "row_stride", "owner_stride", "splits"])
def _columns_kernel(
    q, q_stride_n, lse, lse_stride, requests, order, owners, owner_stride, row_blocks, row_stride, rung, rung_tiers,
    pages, table, counts, headers, splits, layer, scale, cap,
    L: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, P: tl.constexpr,
    page_bytes: tl.constexpr, CLASSES: tl.constexpr, TOKEN_KEYS: tl.constexpr, CAPPED: tl.constexpr,
    TILE: tl.constexpr, QB: tl.constexpr, NQ: tl.constexpr, NEAREST: tl.constexpr, REDUCE: tl.constexpr,
    POWER: tl.constexpr, STRIDE: tl.constexpr, ASM: tl.constexpr,
):
    """Any grid: programs take items (observing request, head, every splits-th block) in turn, as many as there are.

    requests int32 `[B, 4]`: tokens with the new ones (0: nobody observes), first observing query in q, their number,
    the position of the first. order, owners: see `_owners_kernel`. `rung_tiers` int32 `[rungs]`: bit c is set where a
    block at this rung holds tokens of class c; CLASSES as in `_extend_kernel`, with the score offset added.
    """
    t = tl.arange(0, TILE)
    for item in range(tl.program_id(0), tl.load(order) * H * splits, tl.num_programs(0)):
        me = tl.load(order + 1 + item // (H * splits))
        h = item // splits % H
        tokens = tl.load(requests + me * 4)
        for j in range(item % splits, (tokens + P - 1) // P, splits):
            last = tl.load(owners + me.to(tl.int64) * owner_stride + j)
            block = tl.load(row_blocks + me.to(tl.int64) * row_stride + j).to(tl.int64)
            held = tl.load(rung_tiers + tl.maximum(tl.load(rung + block).to(tl.int32), 0))
            held = tl.where(last >= 0, held, 0)
            head = block * (L * H) + layer * H + h
            for c in tl.static_range(len(CLASSES)):
                if (held >> c) & 1 == 1:
                    row = table + head * E + CLASSES[c][3] * (E - 1)
                    if CLASSES[c][0] == 16:
                        count = tl.minimum(tokens - j * P, P)
                    else:
                        count = tl.load(counts + head * 2 + CLASSES[c][3]).to(tl.int32)
                    for t0 in range(0, count, TILE):
                        live = t0 + t < count
                        if CLASSES[c][0] == 16:
                            base, slot = locate(pages, row, page_bytes, t0, count, t, CLASSES[c][2], 1, 1)
                            d = tl.arange(0, D)
                            kp = base.to(tl.pointer_type(q.dtype.element_ty)) + slot * D
                            k = (tl.load(kp[:, None] + d[None, :], mask=live[:, None], other=0.0),)
                            received = _received(
                                k, tl.where(live, j * P + t0 + t, -1), q, q_stride_n, lse, lse_stride, requests,
                                row_blocks, row_stride, block, j, me, last, h, scale, cap, q.dtype.element_ty, 1, H, D,
                                G, P, TILE, QB, NQ, CAPPED, NEAREST, REDUCE, POWER, STRIDE, ASM,
                            )
                        else:
                            base, slot = locate(
                                pages, row, page_bytes, t0, count, t, CLASSES[c][2], 1 - 2 * CLASSES[c][3], 16
                            )
                            k = _packed_keys(
                                base, slot, headers + head * (2 * D), live, CLASSES[c][0], CLASSES[c][2],
                                CLASSES[c][4], D, TOKEN_KEYS, ASM,
                            )
                            # Packed blocks lie before every query, in no order that would say who is near.
                            received = _received(
                                k, tl.where(live, 0, -1), q, q_stride_n, lse, lse_stride, requests, row_blocks,
                                row_stride, block, j, me, last, h, scale, cap, tl.float16, 8 // CLASSES[c][0], H, D, G,
                                P, TILE, QB, NQ, CAPPED, 0, REDUCE, POWER, STRIDE, ASM,
                            )
                        _add(base, slot, received, live, CLASSES[c][7])


@triton.jit
def _packed_keys(
    base, slot, header, live, KB: tl.constexpr, T: tl.constexpr, KMETA: tl.constexpr, D: tl.constexpr,
    TOKEN_KEYS: tl.constexpr, ASM: tl.constexpr,
):
    """fp16 keys of one tile, 8 / KB pieces `[TILE, D*KB/8]`."""
    DK: tl.constexpr = D * KB // 8
    dk = tl.arange(0, DK)
    codes = tl.load((base + slot * DK)[:, None] + dk[None, :], mask=live[:, None], other=0)
    ks, kz = key_scales(base, slot, header, live, KB, T, KMETA, D, TOKEN_KEYS)
    return dequant(codes, ks, kz, KB, ASM)


class ReceivedAttention:
    """`plan` (an extend) or `plan_decode` once a forward; then `add` once a layer, after the rows were appended and the
    attention's LSE is known. After `plan_decode`, `add` can be captured in a CUDA graph.
    """

    def __init__(
        self,
        store: PageStore,
        *,
        query_heads: int,
        observe: Observe,
        max_batch: int = 0,
        max_blocks: int = 0,
        tile: int = 64,
        queries: int = 64,
        warps: int = 4,
    ):
        """`max_batch` requests of `max_blocks` blocks: the most of a decode step, 0 where there is none; `tile` keys
        and `queries` a product."""
        layout = store.layout
        if not layout.scored:
            raise ValueError("this layout keeps no scores")
        self.store, self.observe, self.warps = store, observe, warps
        self.group = query_heads // layout.heads
        self.tile, self.queries = min(tile, triton.next_power_of_2(layout.block_tokens)), queries
        classes = ladder_classes(store)
        names = ("key_meta", "value_codes", "value_meta", "scores")
        self._classes = tuple(
            (f.key_bits, f.value_bits, layout.page(f).tokens, side, *(layout.page(f).offset(n) for n in names))
            for f, side in classes
        )
        masks = [1]
        for rung in store.ladder[1:]:
            low = 0 if rung.low is None else 1 << classes.index((rung.low, 1))
            masks.append(1 << classes.index((rung.high, 0)) | low)
        self._tiers = torch.tensor(masks, dtype=torch.int32, device=store.device)
        steps = torch.arange(max_batch, dtype=torch.int32, device=store.device)
        self._decoding = torch.stack((steps, steps, torch.ones_like(steps), steps), 1)
        self._step_order = torch.empty(1 + max_batch, dtype=torch.int32, device=store.device)
        self._step_owners = torch.empty((max_batch, max_blocks), dtype=torch.int32, device=store.device)
        self._resident = 8
        if store.device.type == "cuda":
            self._resident = STEP_PROGRAMS * torch.cuda.get_device_properties(store.device).multi_processor_count

    def plan(self, row_blocks: torch.Tensor, prefix_lens: list[int], extend_lens: list[int]) -> None:
        """`row_blocks[B, NB]` int32 on the device, lengths on the host; does not sync."""
        requests, start = [], 0
        window, self._stride = self.observe.window, self.observe.stride
        for prefix, new in zip(prefix_lens, extend_lens):
            first = prefix if window is None else max(prefix, prefix + new - window)
            queries = (prefix + new) // self._stride - first // self._stride
            first += -(first + 1) % self._stride
            requests.append((prefix + new if queries else 0, start + first - prefix, queries, first))
            start += new
        host = torch.tensor(requests, dtype=torch.int32).view(-1, 4)
        if self.store.device.type == "cuda":
            host = host.pin_memory()
        self._requests, self._rows = host.to(self.store.device, non_blocking=True), row_blocks
        blocks = -(-max((r[0] for r in requests), default=0) // self.store.layout.block_tokens)
        self._one, self._owners = 0, torch.empty_like(row_blocks)
        self._order = torch.empty(1 + len(requests), dtype=torch.int32, device=self.store.device)
        each = len(requests) * self.store.layout.heads
        self._splits = min(blocks, max(1, PROGRAMS // max(1, each)))
        self._programs = each * self._splits
        self._assign(blocks)

    def plan_decode(self, row_blocks: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """`row_blocks[B, NB]`, `seq_lens[B]` int32 on the device, static buffers; one query a request.

        ValueError for more requests or blocks than this was made for.
        """
        n, blocks = row_blocks.shape
        most = tuple(self._step_owners.shape)
        if n > most[0] or blocks > most[1]:
            raise ValueError(f"made for steps of {most} requests and blocks, got {(n, blocks)}")
        self._requests, self._rows = self._decoding[:n], row_blocks
        self._stride, self._one = self.observe.decode_stride, max(8, triton.next_power_of_2(self.group))
        torch.mul(seq_lens, seq_lens % self._stride == 0, out=self._requests[:, 0])
        torch.sub(seq_lens, 1, out=self._requests[:, 3])
        self._owners, self._order = self._step_owners, self._step_order
        # Which requests observe is not known here: as many programs as run at once share what there is.
        self._splits, self._programs = min(blocks, STEP_SPLITS), self._resident
        self._assign(blocks)

    def _assign(self, blocks: int) -> None:
        n = len(self._requests)
        if n and blocks:
            _owners_kernel[(n, -(-blocks // 32))](
                self._requests, self._rows, self._rows.stride(0), n, self._order, self._owners,
                self._owners.stride(0), self.store.layout.block_tokens, 32, 32, num_warps=4,
            )  # fmt: skip

    def add(self, layer: int, q: torch.Tensor, lse: torch.Tensor, *, scale: float, logit_cap: float = 0.0) -> None:
        """Add to the scores of all stored tokens what the observing queries of `q[N, Hq, D]` pay them.

        `lse` fp32 `[N, Hq]`, base 2: over the prefix and the new tokens up to the query's own.
        """
        store, g, seen = self.store, self.store.layout, self.observe
        if not self._programs:
            return
        if q.stride(1) != g.head_dim or q.stride(2) != 1:
            q = q.contiguous()
        _columns_kernel[(self._programs,)](
            q, q.stride(0), lse, lse.stride(0), self._requests, self._order, self._owners, self._owners.stride(0),
            self._rows, self._rows.stride(0), store.rung, self._tiers, store.pages, store.table, store.counts,
            store.headers, self._splits, layer, scale, logit_cap, g.layers, g.heads, self.group, g.head_dim,
            g.head_pages_bf16, g.block_tokens, g.page_bytes, self._classes, g.key_mode == TOKEN, logit_cap > 0,
            self.tile, self.queries, self._one, seen.nearest, seen.reduce, seen.power, self._stride, not INTERPRET,
            num_warps=STEP_WARPS if self._one else self.warps,
        )  # fmt: skip
