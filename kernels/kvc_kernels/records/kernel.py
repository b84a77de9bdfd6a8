"""Records on the GPU: `reference` with one launch for all pages and headers of all blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.bound_launch import BoundLaunch
from ..layout import RecordLayout
from ..pages.kernel import exchange_pages, take_bf16, tier_tokens
from ..store import PageStore

CHUNK = 2048  # words of 4 bytes that a program moves at a time
# A program is one warp, so it takes the place of one decode CTA if both kernels run.
WARPS = 1


@triton.jit
def _copy_words(source, target, WORDS: tl.constexpr, CHUNK: tl.constexpr, REST: tl.constexpr):
    """Copy WORDS words. The remainder after whole chunks, at most REST words (a power of two), is read first, so that a
    program rarely waits for memory twice."""
    FULL: tl.constexpr = WORDS // CHUNK * CHUNK
    last = FULL + tl.arange(0, REST)
    if WORDS > FULL:
        rest = tl.load(source + last, mask=last < WORDS)
    for at in tl.static_range(0, FULL, CHUNK):
        word = at + tl.arange(0, CHUNK)
        tl.store(target + word, tl.load(source + word))
    if WORDS > FULL:
        tl.store(target + last, rest, mask=last < WORDS)


@triton.jit
def _page_counts(counts, format_id, FORMATS: tl.constexpr, ENTRIES: tl.constexpr):
    """Pages (high, low) of heads whose counts are words `counts`, in a block of storage format `format_id`. FORMATS:
    tokens per page of each format's tiers, 0 for a missing one."""
    high = tl.where(format_id == 0, ENTRIES, 0) + counts * 0
    low = counts * 0
    for f in tl.static_range(1, len(FORMATS)):
        high = tl.where(format_id == f, ((counts & 0xFFFF) + FORMATS[f][0] - 1) // FORMATS[f][0], high)
        if FORMATS[f][1] > 0:
            low = tl.where(format_id == f, ((counts >> 16) + FORMATS[f][1] - 1) // FORMATS[f][1], low)
    return high, low


# The blocks of one buffer are a slice of those of an operation. Its alignment must not select another compiled kernel.
@triton.jit(do_not_specialize=["first_block"], do_not_specialize_on_alignment=["blocks"])
def _copy_records_kernel(
    first_block, blocks, records, stride, pages, table, format_id, headers, counts, query_counts,
    PAGE: tl.constexpr, HEADER: tl.constexpr, ROWS: tl.constexpr, ENTRIES: tl.constexpr, FORMATS: tl.constexpr,
    COUNTS_AT: tl.constexpr, QUERIES_AT: tl.constexpr, HEADERS_AT: tl.constexpr, PAGES_AT: tl.constexpr,
    CHUNK: tl.constexpr, PAGE_REST: tl.constexpr, HEADER_REST: tl.constexpr, ROW_SIDE: tl.constexpr,
    ENTRY_SIDE: tl.constexpr, TO_RECORDS: tl.constexpr,
):
    """grid (n * ROWS,), for the n blocks from `blocks[first_block]` on: a program copies the key header, the counts and
    the pages of one head of one block to their places in the block's record, or back; with a block's first head also
    the query count.

    All in words of 4 bytes: pages `[num_pages, PAGE]`, table `[num_blocks, ROWS, ENTRIES]`, headers
    `[num_blocks, ROWS, HEADER]`, counts `[num_blocks, ROWS]`, records `stride` apart. Counts are not read back, because
    the blocks got them when their pages were taken.
    """
    program = tl.program_id(0).to(tl.int64)
    n = program // ROWS
    head = program % ROWS
    block = tl.load(blocks + first_block + n)
    # Pages of all heads of the block, since those before this head come first in the record.
    rows = tl.arange(0, ROW_SIDE)
    words = tl.load(counts + block * ROWS + rows, mask=rows < ROWS, other=0)
    entry = tl.arange(0, ENTRY_SIDE)
    ids = tl.load(table + (block * ROWS + head) * ENTRIES + entry, mask=entry < ENTRIES, other=0)
    high, low = _page_counts(words, tl.load(format_id + block).to(tl.int32), FORMATS, ENTRIES)
    first = tl.sum(tl.where(rows < head, high + low, 0))
    high_pages = tl.sum(tl.where(rows == head, high, 0))
    low_pages = tl.sum(tl.where(rows == head, low, 0))
    record = records + n * stride
    header = headers + (block * ROWS + head) * HEADER
    stored_header = record + HEADERS_AT + head * HEADER
    if TO_RECORDS:
        _copy_words(header, stored_header, HEADER, CHUNK, HEADER_REST)
        tl.store(record + COUNTS_AT + head, tl.sum(tl.where(rows == head, words, 0)))
        if head == 0:
            tl.store(record + QUERIES_AT, tl.load(query_counts + block))
    else:
        _copy_words(stored_header, header, HEADER, CHUNK, HEADER_REST)
        if head == 0:
            tl.store(query_counts + block, tl.load(record + QUERIES_AT))
    for e in range(high_pages + low_pages):
        at = tl.where(e < high_pages, e, ENTRIES - 1 - (e - high_pages))  # low pages lie at the end, in reverse
        page = pages + tl.sum(tl.where(entry == at, ids, 0)).to(tl.int64) * PAGE
        stored = record + PAGES_AT + (first + e).to(tl.int64) * PAGE
        if TO_RECORDS:
            _copy_words(page, stored, PAGE, CHUNK, PAGE_REST)
        else:
            _copy_words(stored, page, PAGE, CHUNK, PAGE_REST)


def _constants(store: PageStore) -> tuple:
    """The kernel's constants from PAGE to ENTRY_SIDE."""
    if (known := store.launch_constants.get(("records",))) is None:
        layout, at = store.layout, RecordLayout(store.layout).offsets
        heads, entries = layout.layers * layout.heads, layout.head_pages_bf16
        page, header = layout.page_bytes // 4, layout.header_bytes // 4
        formats = tuple(tier_tokens(layout, f) for f in store.block_formats)
        offsets = (at[name] // 4 for name in ("counts", "query_count", "headers", "pages"))
        rests = (triton.next_power_of_2(max(1, words % CHUNK)) for words in (page, header))
        sides = triton.next_power_of_2(heads), triton.next_power_of_2(entries)
        known = page, header, heads, entries, formats, *offsets, CHUNK, *rests, *sides
        store.launch_constants["records",] = known
    return known


def _copy(store: PageStore, blocks: torch.Tensor, records: torch.Tensor, first: int, to_records: bool) -> None:
    if not records.shape[0]:
        return
    key = "copy_records", to_records
    if (launch := store.launch_constants.get(key)) is None:
        headers, counts, pages = (x.view(torch.int32) for x in (store.headers, store.counts, store.pages))
        launch = store.launch_constants[key] = BoundLaunch(
            _copy_records_kernel, pages, store.table, store.format_id, headers, counts, store.query_counts,
            *_constants(store), to_records, num_warps=WARPS,
        )  # fmt: skip
    rows = store.layout.layers * store.layout.heads
    launch((records.shape[0] * rows, 1, 1), first, blocks.long(), records.view(torch.int32))


def take_stored(store: PageStore, blocks: torch.Tensor, format_id: int, counts: torch.Tensor) -> None:
    """`reference.take_stored` as kernels."""
    blocks = blocks.long()
    if not blocks.numel():
        return
    if format_id == 0:
        take_bf16(store, blocks)
        return
    exchange_pages(store, blocks, format_id, counts=counts.reshape(-1, 2).to(torch.int32))
    store.query_counts.index_fill_(0, blocks, 0)


def write_records(store: PageStore, blocks: torch.Tensor, records: torch.Tensor) -> None:
    """`reference.write_records` as a kernel. Rows of `records` are a multiple of 4 bytes apart."""
    _copy(store, blocks, records, 0, True)


def read_records(store: PageStore, blocks: torch.Tensor, records: torch.Tensor, *, first: int = 0) -> None:
    """`reference.read_records` as a kernel. Rows of `records` are a multiple of 4 bytes apart."""
    _copy(store, blocks, records, first, False)
