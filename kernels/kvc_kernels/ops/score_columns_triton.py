"""Attention that tokens receive, without the attention matrix: column sums from the log-sum-exp of each query.

One program owns one block of one KV head: it multiplies the block's keys with the observing queries again, takes
exp2(logit - lse), sums over queries head by head, and adds the largest head's sum to the scores of its own slots. No
slot has two writers, so no atomics are needed and no order decides.
"""

# ruff: noqa: RUF005  (the compiler knows no unpacking inside tuples)
from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..layout import TOKEN
from ..store import PageStore
from .decode_plan_triton import ladder_classes
from .extend_body_triton import LOG2E, capped, dequant, load_q, locate
from .observe import Observe

INTERPRET = triton.knobs.runtime.interpret


@triton.jit
def _column_sums(
    k, q_rows, lse_rows, q_stride_n, lse_stride, n_queries, position, first_position, scale, cap, dtype: tl.constexpr,
    FIELDS: tl.constexpr, D: tl.constexpr, G: tl.constexpr, TILE: tl.constexpr, QB: tl.constexpr,
    CAPPED: tl.constexpr, CAUSAL: tl.constexpr, ASM: tl.constexpr,
):
    """fp32 `[TILE]`: sum over queries of the probability paid to keys k (FIELDS pieces `[TILE, D / FIELDS]`), the
    largest of G heads. `q_rows`, `lse_rows`: the first observing query of the first head, at `first_position`.
    """
    best = tl.zeros([TILE], tl.float32)
    n = tl.arange(0, QB)
    for g in range(G):
        total = tl.zeros([TILE], tl.float32)
        for at in range(0, n_queries, QB):
            live = at + n < n_queries
            row = (at + n).to(tl.int64)
            q = load_q(q_rows + row * q_stride_n + g * D, live, dtype, D, FIELDS)
            lse = tl.load(lse_rows + row * lse_stride + g, mask=live, other=0.0)
            s = tl.zeros([TILE, QB], tl.float32)
            for f in tl.static_range(FIELDS):
                if ASM:
                    s = tl.dot(k[f], tl.trans(q[f]), s)
                else:  # the interpreter multiplies bf16 words as integers
                    s = tl.dot(k[f].to(tl.float32), tl.trans(q[f].to(tl.float32)), s)
            if CAPPED:
                s = capped(s * scale, cap) * LOG2E
            else:
                s = s * (scale * LOG2E)
            seen = live[None, :] & (position >= 0)[:, None]
            if CAUSAL:
                # What a query pays its own token is left out.
                seen = seen & (position[:, None] < (first_position + at + n)[None, :])
            total += tl.sum(tl.where(seen, tl.exp2(s - lse[None, :]), 0.0), 1)
        best = tl.maximum(best, total)
    return best


@triton.jit
def _add(pages, base, slot, received, live, SOFF: tl.constexpr):
    at = (base + SOFF).to(tl.pointer_type(tl.float32)) + slot
    tl.store(at, tl.load(at, mask=live, other=0.0) + received, mask=live)


@triton.jit(do_not_specialize=["layer", "scale", "cap", "row_stride"])
def _columns_kernel(
    q, q_stride_n, lse, lse_stride, items, row_blocks, row_stride, rung, rung_tiers, pages, table, counts, headers,
    layer, scale, cap,
    L: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, P: tl.constexpr,
    page_bytes: tl.constexpr, CLASSES: tl.constexpr, TOKEN_KEYS: tl.constexpr, CAPPED: tl.constexpr,
    TILE: tl.constexpr, QB: tl.constexpr, ASM: tl.constexpr,
):
    """grid (items, H). items int32 `[n, 6]`: request, place of the block in its row, tokens of the request, first
    observing query in q, their number, the position of the first. `rung_tiers` int32 `[rungs]`: bit c is set where a
    block at this rung holds tokens of class c; CLASSES as in `_extend_kernel`, with the score offset added.
    """
    item = items + tl.program_id(0) * 6
    h = tl.program_id(1)
    request = tl.load(item)
    j = tl.load(item + 1)
    first = tl.load(item + 3).to(tl.int64)
    n_queries = tl.load(item + 4)
    first_position = tl.load(item + 5)
    block = tl.load(row_blocks + request.to(tl.int64) * row_stride + j).to(tl.int64)
    held = tl.load(rung_tiers + tl.maximum(tl.load(rung + block).to(tl.int32), 0))
    head = (layer * H + h).to(tl.int64)
    q_rows = q + first * q_stride_n + h * (G * D)
    lse_rows = lse + first * lse_stride + h * G
    t = tl.arange(0, TILE)
    for c in tl.static_range(len(CLASSES)):
        if (held >> c) & 1 == 1:
            row = table + (block * L * H + head) * E + CLASSES[c][3] * (E - 1)
            if CLASSES[c][0] == 16:
                count = tl.minimum(tl.load(item + 2) - j * P, P)
                d = tl.arange(0, D)
                for t0 in range(0, count, TILE):
                    live = t0 + t < count
                    base, slot = locate(pages, row, page_bytes, t0, count, t, CLASSES[c][2], 1, 1)
                    kp = base.to(tl.pointer_type(q.dtype.element_ty)) + slot * D
                    k = tl.load(kp[:, None] + d[None, :], mask=live[:, None], other=0.0)
                    position = tl.where(live, j * P + t0 + t, -1)
                    received = _column_sums(
                        (k,), q_rows, lse_rows, q_stride_n, lse_stride, n_queries, position, first_position, scale,
                        cap, q.dtype.element_ty, 1, D, G, TILE, QB, CAPPED, True, ASM,
                    )
                    _add(pages, base, slot, received, live, CLASSES[c][7])
            else:
                count = tl.load(counts + (block * L * H + head) * 2 + CLASSES[c][3]).to(tl.int32)
                header = headers + (block * L * H + head) * (2 * D)
                for t0 in range(0, count, TILE):
                    live = t0 + t < count
                    base, slot = locate(
                        pages, row, page_bytes, t0, count, t, CLASSES[c][2], 1 - 2 * CLASSES[c][3], 16
                    )
                    k = _packed_keys(
                        base, slot, header, live, CLASSES[c][0], CLASSES[c][2], CLASSES[c][4], D, TOKEN_KEYS, ASM
                    )
                    received = _column_sums(
                        k, q_rows, lse_rows, q_stride_n, lse_stride, n_queries, tl.where(live, 0, -1), 0, scale, cap,
                        tl.float16, 8 // CLASSES[c][0], D, G, TILE, QB, CAPPED, False, ASM,
                    )
                    _add(pages, base, slot, received, live, CLASSES[c][7])


@triton.jit
def _packed_keys(
    base, slot, header, live, KB: tl.constexpr, T: tl.constexpr, KMETA: tl.constexpr, D: tl.constexpr,
    TOKEN_KEYS: tl.constexpr, ASM: tl.constexpr,
):
    """fp16 keys of one tile, 8 / KB pieces `[TILE, D*KB/8]`."""
    DK: tl.constexpr = D * KB // 8
    dk = tl.arange(0, DK)
    codes = tl.load((base + slot * DK)[:, None] + dk[None, :], mask=live[:, None], other=0)
    ks = ()
    kz = ()
    if TOKEN_KEYS:
        meta = (base + KMETA).to(tl.pointer_type(tl.float16)) + slot
        one = tl.load(meta, mask=live, other=0.0)[:, None]
        two = tl.load(meta + T, mask=live, other=0.0)[:, None]
        for _ in tl.static_range(8 // KB):
            ks = ks + (one,)
            kz = kz + (two,)
    else:
        for f in tl.static_range(8 // KB):
            grid = tl.load(header + f * DK + dk).to(tl.float32) * (255 // ((1 << KB) - 1))
            ks = ks + (grid.to(tl.float16)[None, :],)
            kz = kz + (tl.load(header + D + f * DK + dk)[None, :],)
    return dequant(codes, ks, kz, KB, ASM)


class ReceivedAttention:
    """`plan` once a forward; `add` once a layer, after the rows were appended and the attention's LSE is known."""

    def __init__(self, store: PageStore, *, query_heads: int, observe: Observe, tile: int = 64, queries: int = 64):
        layout = store.layout
        if not layout.scored:
            raise ValueError("this layout keeps no scores")
        if observe != Observe(observe.window):
            raise ValueError(f"the kernel sums plain probabilities and takes the largest head, not {observe}")
        self.store, self.window = store, observe.window
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

    def plan(self, row_blocks: torch.Tensor, prefix_lens: list[int], extend_lens: list[int]) -> None:
        """`row_blocks[B, NB]` int32 on the device, lengths on the host; does not sync."""
        p, items, start = self.store.layout.block_tokens, [], 0
        for r, (prefix, new) in enumerate(zip(prefix_lens, extend_lens)):
            skip = 0 if self.window is None else max(0, new - self.window)
            for j in range(-(-(prefix + new) // p) if new else 0):
                items.append((r, j, prefix + new, start + skip, new - skip, prefix + skip))
            start += new
        host = torch.tensor(items, dtype=torch.int32).view(-1, 6)
        if self.store.device.type == "cuda":
            host = host.pin_memory()
        self._items, self._rows = host.to(self.store.device, non_blocking=True), row_blocks

    def add(self, layer: int, q: torch.Tensor, lse: torch.Tensor, *, scale: float, logit_cap: float = 0.0) -> None:
        """Add to the scores of all stored tokens what the observing queries of `q[N, Hq, D]` pay them.

        `lse` fp32 `[N, Hq]`, base 2: over the prefix and the new tokens up to the query's own.
        """
        store, g = self.store, self.store.layout
        if not len(self._items):
            return
        if q.stride(1) != g.head_dim or q.stride(2) != 1:
            q = q.contiguous()
        _columns_kernel[(len(self._items), g.heads)](
            q, q.stride(0), lse, lse.stride(0), self._items, self._rows, self._rows.stride(0), store.rung,
            self._tiers, store.pages, store.table, store.counts, store.headers, layer, scale, logit_cap,
            g.layers, g.heads, self.group, g.head_dim, g.head_pages_bf16, g.block_tokens, g.page_bytes,
            self._classes, g.key_mode == TOKEN, logit_cap > 0, self.tile, self.queries, not INTERPRET, num_warps=4,
        )  # fmt: skip
