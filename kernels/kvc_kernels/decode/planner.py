"""Work list of a decode step, built on the GPU in static buffers: two small launches without a host sync."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.format_class import format_class_masks, format_tiers
from ..formats import BF16
from ..layout import BlockFormat
from ..store import PageStore

CHUNK = 32  # blocks whose tiles a program lists at a time, one per lane: 8K tokens at 256 per block
PLAIN_COST = 2.0  # cost of a bf16 token in units of a packed token
MIN_BLOCK_COST = 32.0  # a nearly empty block costs about as much as 32 tokens


# Decode steps and prefills of every size share one compiled kernel, so no address or stride may select another.
@triton.jit(do_not_specialize=["NB", "row_stride"], do_not_specialize_on_alignment=["row_blocks", "seq_lens", "skip"])
def _split_kernel(
    row_blocks, row_stride, seq_lens, format_id, class_masks, skip, lists, sizes,
    NB, NC: tl.constexpr, P: tl.constexpr, STEP: tl.constexpr, WINDOW: tl.constexpr = -1,
):
    """grid (B,). Sort a request's blocks into lists int64 `[B, NC, NB]` (block << 32 | tokens), sizes int32 `[B, NC]`.

    `class_masks` int32 `[formats]`: bit c is set if a block in this format holds tokens of class c. Full
    uncompressed blocks (class 0) are skipped if `skip` int32 `[B]` is not 0: another kernel reads them from dense rows.

    WINDOW >= 0: only blocks that hold one of the last WINDOW + 1 tokens: block << 32 | first such token << 16 | tokens.
    """
    b = tl.program_id(0)
    seq_len = tl.load(seq_lens + b)
    keep_full = tl.load(skip + b) == 0
    nb = tl.minimum((seq_len + P - 1) // P, NB)
    seen = 0
    if WINDOW >= 0:
        seen = tl.maximum(seq_len - 1 - WINDOW, 0)
    for c in tl.static_range(NC):
        listed = tl.zeros([], tl.int32)
        for at in range(seen // P, nb, STEP):
            j = at + tl.arange(0, STEP)
            block = tl.load(row_blocks + b.to(tl.int64) * row_stride + j, mask=j < nb, other=0).to(tl.int64)
            r = tl.maximum(tl.load(format_id + block, mask=j < nb, other=0).to(tl.int32), 0)
            bits = tl.load(class_masks + r, mask=j < nb, other=0)
            hit = ((bits >> c) & 1) * (j < nb).to(tl.int32)
            tokens = tl.minimum(seq_len - j * P, P).to(tl.int64)
            if c == 0:
                hit = hit * ((tokens < P) | keep_full).to(tl.int32)
            to = listed + tl.cumsum(hit, 0) - hit
            if WINDOW >= 0:
                tokens = tokens | (tl.maximum(seen - j * P, 0).to(tl.int64) << 16)
            tl.store(lists + (b.to(tl.int64) * NC + c) * NB + to, (block << 32) | tokens, mask=hit == 1)
            listed += tl.sum(hit, 0)
        tl.store(sizes + b * NC + c, listed)


@triton.jit
def _first_block(column, budget, start, weight, n):
    """First block of a list with start cost `start` whose middle lies in cost column `column` or later."""
    k = tl.ceil((column.to(tl.float32) * budget - start) / weight - 0.5).to(tl.int32)
    return tl.minimum(tl.maximum(k, 0), n)


@triton.jit(do_not_specialize=["batch", "columns"])
def _items_kernel(
    sizes, weights, items, ranges, column_ranges, batch, columns,
    NC: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
):
    """grid (B,). Split the cost of all lists, laid end to end, into `columns` equal columns, cutting at block
    boundaries.

    A column's part of one list is a work item, int32 `[items, 4]`. Items are in the order of lists and of columns
    alike, so requests and columns both have ranges of them. Each program adds up the same totals over the B * NC sizes,
    padded to `[WIDTH]`, which is cheaper than a third launch. Columns are no narrower than a block, hence no item is
    empty.
    """
    b = tl.program_id(0)
    i = tl.arange(0, WIDTH)
    n = tl.load(sizes + i, mask=i < batch * NC, other=0)
    w = tl.load(weights + i % NC)
    cost = n.to(tl.float32) * w
    total = tl.sum(cost, 0)
    budget = tl.maximum(total / columns, tl.max(tl.where(n > 0, w, 1e-6), 0))
    start = tl.cumsum(cost, 0) - cost
    first_column = tl.minimum(((start + 0.5 * w) / budget).to(tl.int32), columns - 1)
    last_column = tl.minimum(((start + cost - 0.5 * w) / budget).to(tl.int32), columns - 1)
    cuts = tl.where(n > 0, tl.maximum(last_column - first_column, 0) + 1, 0)
    place = tl.cumsum(cuts, 0) - cuts
    for c in tl.static_range(NC):
        is_list = i == b * NC + c
        num_items = tl.sum(tl.where(is_list, cuts, 0), 0)
        blocks = tl.sum(tl.where(is_list, n, 0), 0)
        base = tl.sum(tl.where(is_list, place, 0), 0)
        column = tl.sum(tl.where(is_list, first_column, 0), 0)
        at_cost = tl.sum(tl.where(is_list, start, 0.0), 0)
        weight = tl.sum(tl.where(is_list, w, 0.0), 0)
        if c == 0:
            tl.store(ranges + b, base)
        for at in range(0, num_items, STEP):
            k = at + tl.arange(0, STEP)
            lo = tl.where(k == 0, 0, _first_block(column + k, budget, at_cost, weight, blocks))
            hi = tl.where(k == num_items - 1, blocks, _first_block(column + k + 1, budget, at_cost, weight, blocks))
            to = items + (base + k) * 4
            tl.store(to, b + tl.zeros([STEP], tl.int32), mask=k < num_items)
            tl.store(to + 1, c + tl.zeros([STEP], tl.int32), mask=k < num_items)
            tl.store(to + 2, lo, mask=k < num_items)
            tl.store(to + 3, hi - lo, mask=k < num_items)
    # Items before a column: each list's items of earlier columns.
    per = (columns + batch) // batch
    for at in range(b * per, tl.minimum((b + 1) * per, columns + 1)):
        before = tl.minimum(tl.maximum(at - first_column, 0), cuts)
        tl.store(column_ranges + at, tl.sum(before, 0))
    if b == 0:
        tl.store(ranges + batch, tl.sum(cuts, 0))


class DecodePlan:
    """Static buffers of a decode step for up to `max_batch` requests of `max_blocks` blocks.

    | tensor         | shape, dtype            | meaning                                               |
    |----------------|-------------------------|-------------------------------------------------------|
    | `lists`        | int64 `[B, C, NB]`      | blocks of a request by class: see `_split_kernel`     |
    | `sizes`        | int32 `[B, C]`          | lengths of the lists                                  |
    | `items`        | int32 `[items, 4]`      | request, class, first list place, blocks              |
    | `ranges`       | int32 `[B + 1]`         | items of each request                                 |
    | `column_ranges`| int32 `[columns + 1]`   | items of each column, the share of a persistent CTA   |

    Addresses and launch grids depend on the arguments alone, so `update` and the layers can be captured in one CUDA
    graph and replayed with other lengths and blocks.
    """

    def __init__(self, store: PageStore, max_batch: int, max_blocks: int, *, columns: int, window: int = -1):
        layout = store.layout
        self.window = window
        self.classes = format_tiers(store)
        nc, dev = len(self.classes), store.device
        self.max_batch, self.max_blocks = max_batch, max_blocks
        self.columns = max(1, min(columns, max_batch * max_blocks))
        self.capacity = self.columns + max_batch * nc
        self._no_skip = torch.zeros(max_batch, dtype=torch.int32, device=dev)
        self.lists = torch.zeros((max_batch, nc, max_blocks), dtype=torch.int64, device=dev)
        self.sizes = torch.zeros((max_batch, nc), dtype=torch.int32, device=dev)
        self.items = torch.zeros((self.capacity, 4), dtype=torch.int32, device=dev)
        self.ranges = torch.zeros(max_batch + 1, dtype=torch.int32, device=dev)
        self.column_ranges = torch.zeros(self.columns + 1, dtype=torch.int32, device=dev)
        tokens = [[float(layout.block_tokens)]] + [[] for _ in self.classes[1:]]
        for block_format in store.block_formats[1:]:
            for c, share in self._expected(store, block_format):
                tokens[c].append(share)
        formats = [f for f, _ in self.classes]
        self.class_masks = torch.tensor(format_class_masks(store), dtype=torch.int32, device=dev)
        # A tile takes about the same time in every packed format, and a few tokens take half as long as a full tile.
        cost = [max(PLAIN_COST * t if f is BF16 else t, MIN_BLOCK_COST) for f, t in zip(formats, map(max, tokens))]
        self.weights = torch.tensor(cost, dtype=torch.float32, device=dev)

    def _expected(self, store: PageStore, block_format: BlockFormat) -> list[tuple[int, float]]:
        """(class, tokens per head) that a block at `block_format` is assumed to hold: its page quota, split evenly over
        tiers.
        """
        layout = store.layout
        pages = block_format.pages / (layout.layers * layout.heads) or layout.head_pages_bf16
        tiers = [(f, side) for side, f in enumerate((block_format.high, block_format.low)) if f is not None]
        share = pages / len(tiers)
        return [
            (self.classes.index(tier), min(layout.block_tokens, share * layout.page(tier[0]).tokens)) for tier in tiers
        ]

    def update(self, store: PageStore, row_blocks: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Fill the buffers for `row_blocks[B, NB]` (int32) and `seq_lens[B]` (int32) on the current stream."""
        batch, nc = row_blocks.shape[0], len(self.classes)
        if batch > self.max_batch or row_blocks.shape[1] > self.max_blocks:
            raise ValueError(f"the plan holds {self.max_batch} x {self.max_blocks}, got {tuple(row_blocks.shape)}")
        if batch == 0:
            return
        _split_kernel[(batch,)](
            row_blocks, row_blocks.stride(0), seq_lens, store.format_id, self.class_masks, self._no_skip, self.lists,
            self.sizes, self.max_blocks, nc, store.layout.block_tokens, 128, self.window, num_warps=4,
        )
        _items_kernel[(batch,)](
            self.sizes, self.weights, self.items, self.ranges, self.column_ranges, batch, self.columns,
            nc, triton.next_power_of_2(self.max_batch * nc), 32, num_warps=4,
        )
