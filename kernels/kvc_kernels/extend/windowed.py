"""Prefill of layers with a sliding window: the blocks in the window are staged as dense rows, then attended to.

A query sees its own token and `window` tokens before it, so a forward reads few blocks besides its own, for any length
of the prefix. They are unpacked into *slots* of one block each, and the new tokens' own blocks are copied there. One
causal call over lists of slots does the attention: of a prefill library, or `window_kernel` without one.

A *run* is new tokens that share a list. With fake-quantized history it is the new tokens of one block, and each block
has a fake-quantized slot for the queries after it and an exact one for its own. Else it is all new tokens of a
request. Formats must keep every token of a block: a window counts positions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd

import torch
import triton

from ..common.upload import upload
from ..formats import Format
from ..store import PageStore
from .dense_prefill import paged_prefill
from .fake_quant_kernel import DenseRows, FakeQuantRows
from .unpack_rows_kernel import UnpackedRows
from .windowed_kernel import window_kernel

INTERPRET = triton.knobs.runtime.interpret
PASS_TOKENS = 32768  # tokens staged at a time; a forward that needs more takes its requests in passes
ROWS, TILE = 64, 64  # query rows per CTA, keys per iteration


@dataclass
class Pass:
    """Requests that are staged together. Lists on the host, one entry per run in the order of the new tokens."""

    p: int  # tokens of a block
    window: int
    tokens: list[int] = field(default_factory=list)  # new tokens
    slots: list[list[int]] = field(default_factory=list)  # slots that it sees
    last: list[int] = field(default_factory=list)  # tokens in the last of its slots
    pages: list[tuple[int, ...]] = field(default_factory=list)  # items of `UnpackedRows`
    rows: list[tuple[int, ...]] = field(default_factory=list)  # items of `FakeQuantRows`
    size: int = 0  # slots taken

    def add(self, request: int, prefix: int, new: int, waiting: list[int], fake_quantized: bool) -> None:
        """`new` tokens after `prefix`; places in `waiting` are full blocks of the prefix that are uncompressed."""
        p, end, at = self.p, prefix + new, self.size
        lo, first, stop = max(0, prefix - self.window) // p, prefix // p, -(-end // p)
        at -= lo  # the slot of the block at place j is at + j
        if not fake_quantized:
            self.pages += [(request, j, at + j, min(p, end - j * p)) for j in range(lo, stop)]
            self._run(new, [*range(at + lo, at + stop)], end - (stop - 1) * p)
            self.size = at + stop
            return
        uncompressed = set(waiting)
        for j in range(lo, first):
            if j in uncompressed:
                self.rows.append((request, j, at + j, -1, p))
            else:
                self.pages.append((request, j, at + j, p))
        own = at + stop - 1  # the last block has no fake-quantized slot
        for j in range(first, stop):
            begin, tokens, exact = max(j * p, prefix), min(p, end - j * p), own + j - first
            self.rows.append((request, j, at + j if j + 1 < stop else -1, exact, tokens))
            seen = range(at + max(0, begin - self.window) // p, at + j)
            self._run(j * p + tokens - begin, [*seen, exact], tokens)
        self.size = own + stop - first

    def _run(self, tokens: int, slots: list[int], last: int) -> None:
        self.tokens.append(tokens)
        self.slots.append(slots)
        self.last.append(last)

    def tiles(self, group: int, rows: int) -> list[tuple[int, ...]]:
        """Items of `window_kernel`: first query, first row, end row, first entry in the lists laid end to end, keys."""
        out, start, first = [], 0, 0
        for tokens, slots, last in zip(self.tokens, self.slots, self.last):
            keys, end = (len(slots) - 1) * self.p + last, tokens * group
            out += [(start, row, end, first, keys, 0, 0, 0) for row in range(0, end, rows)]
            start += tokens
            first += len(slots)
        return out


def cut(
    prefix_lens: list[int],
    extend_lens: list[int],
    waiting: list[list[int]] | None,
    fake_quantized: list[bool],
    *,
    p: int,
    window: int,
    max_slots: int,
) -> list[Pass]:
    """Passes of at most `max_slots` slots each, or of one request."""
    out = [Pass(p, window)]
    for r, (prefix, new) in enumerate(zip(prefix_lens, extend_lens)):
        if not new:
            continue
        needs = (prefix + new) // p + 1 - max(0, prefix - window) // p + (new // p + 1) * fake_quantized[r]
        if out[-1].size and out[-1].size + needs > max_slots:
            out.append(Pass(p, window))
        out[-1].add(r, prefix, new, waiting[r] if waiting else [], fake_quantized[r])
    return [x for x in out if x.tokens]


class WindowedExtend:
    """Plan and buffers of the layers with one window: `plan` once a forward, `run` for each such layer."""

    def __init__(
        self,
        store: PageStore,
        *,
        query_heads: int,
        window: int,
        fake_quant_format: Format | None = None,
        ragged=None,
        pass_tokens: int = PASS_TOKENS,
    ):
        """`window` >= 0: tokens before its own that a query sees. `ragged`: result of `ragged_prefill` for the same
        heads, None: no library. `fake_quant_format`: as in `ops.extend_attention`. `pass_tokens`: tokens staged at a
        time.
        """
        g = store.layout
        if any(r.low is not None for r in store.block_formats):
            raise ValueError("windows need blocks that keep every token in one format")
        self.store, self.window, self.query_heads = store, window, query_heads
        self.fake_quant_format = fake_quant_format
        self.max_slots = max(1, pass_tokens // g.block_tokens)
        self.staged = DenseRows(store) if fake_quant_format is None else FakeQuantRows(store, fake_quant_format)
        self.unpacked = UnpackedRows(store)
        first = paged_prefill(ragged, store.device, g.block_tokens, window=window)
        self.ragged, self.prefills = ragged, [] if first is None else [first]
        self.passes: list[Pass] = []

    def plan(
        self,
        row_blocks: torch.Tensor,
        prefix_lens: list[int],
        extend_lens: list[int],
        waiting: list[list[int]] | None = None,
        formats: list[Format | None] | None = None,
        whole: bool = True,
    ) -> None:
        """`row_blocks` int32 `[B, NB]` on the device, lengths on the host; other arguments as in `ExtendAttention`.
        Blocks that a window sees are always whole. Does not sync."""
        store, p = self.store, self.store.layout.block_tokens
        fmt = self.fake_quant_format
        fake_quantized = [fmt is not None and (not formats or formats[r] is fmt) for r in range(len(extend_lens))]
        self.passes = cut(
            prefix_lens, extend_lens, waiting, fake_quantized, p=p, window=self.window, max_slots=self.max_slots
        )
        self.row_blocks = row_blocks
        tiles = [[] if self.prefills else x.tiles(self.query_heads // store.layout.heads, ROWS) for x in self.passes]
        lists = [[] if self.prefills else [s for slots in x.slots for s in slots] for x in self.passes]
        # Rows of eight come first, so that their alignment, and with it the compiled kernel, does not vary.
        parts = [[(*i, 0, 0, 0) for i in x.rows] for x in self.passes], tiles, [x.pages for x in self.passes]
        flat = [n for part in parts for items in part for item in items for n in item]
        uploaded = upload(flat + [slot for slots in lists for slot in slots], store.device)
        widths = [*(8 * len(x) for x in (*parts[0], *tiles)), *(4 * len(x) for x in parts[2]), *map(len, lists)]
        cuts, n = uploaded.split(widths), len(self.passes)
        self.items = list(zip(cuts[:n], cuts[n : 2 * n], cuts[2 * n : 3 * n], cuts[3 * n :]))
        if self.prefills:
            while len(self.prefills) < n:
                self.prefills.append(
                    self.ragged.paged(store.device, p, window=self.window, first=self.prefills[0])
                )
            for prefill, x in zip(self.prefills, self.passes):
                prefill.plan(x.tokens, x.slots, x.last)
        self.staged.reserve(max((x.size for x in self.passes), default=0))

    def run(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        logit_cap: float = 0.0,
    ) -> torch.Tensor:
        """`q[N, Hq, D]` -> `[N, Hq, D]` in q's dtype. The new rows are read from their pages, to which they were
        appended before."""
        out, at = torch.empty(q.shape, dtype=q.dtype, device=q.device), 0
        q = q if q.stride(-1) == 1 else q.contiguous()
        for i, (x, (rows, tiles, pages, slots)) in enumerate(zip(self.passes, self.items)):
            rows_of_pass = slice(at, at + sum(x.tokens))
            if x.rows:
                self.staged.plan(self.row_blocks, rows.view(-1, 8), x.size)
                self.staged.fill(layer)
            k, v = self.staged.k, self.staged.v  # slots, which hold the new rows
            if x.pages:
                self.unpacked.fill(layer, self.row_blocks, pages, 0, len(x.pages), k, v)
            if self.prefills:
                self.prefills[i].run(q[rows_of_pass], k, v, (out[rows_of_pass], None), scale=scale, logit_cap=logit_cap)
            else:
                self._attend(q[rows_of_pass], k, v, out[rows_of_pass], tiles, slots, scale, logit_cap)
            at = rows_of_pass.stop
        return out

    def _attend(self, q, k, v, out, tiles, slots, scale: float, logit_cap: float) -> None:
        g = self.store.layout
        d = g.head_dim
        window_kernel[(len(tiles) // 8, g.heads)](
            q, q.stride(0), q.stride(1), out, k, v, tiles, slots, scale, logit_cap, g.heads,
            self.query_heads // g.heads, d, g.block_tokens, self.window, ROWS, gcd(TILE, g.block_tokens), min(d, 128),
            logit_cap > 0, 1 if d > 128 else 2, not INTERPRET, num_warps=4,
        )  # fmt: skip
