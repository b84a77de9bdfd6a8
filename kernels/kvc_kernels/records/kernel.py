"""Records on the GPU: `reference` with one launch for all pages and headers of all blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..layout import RecordLayout
from ..pages.kernel import exchange_pages, take_bf16
from ..store import PageStore
from .reference import Places

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


# The blocks of one buffer are a slice of those of an operation. Its alignment must not select another compiled kernel.
@triton.jit(do_not_specialize_on_alignment=["blocks", "ids", "places"])
def _copy_records_kernel(
    pages, headers, counts, query_counts, blocks, records, ids, places, stride,
    PAGE: tl.constexpr, HEADER: tl.constexpr, ROWS: tl.constexpr, ENTRIES: tl.constexpr, COUNTS_AT: tl.constexpr,
    QUERIES_AT: tl.constexpr, HEADERS_AT: tl.constexpr, PAGES_AT: tl.constexpr, CHUNK: tl.constexpr,
    PAGE_REST: tl.constexpr, HEADER_REST: tl.constexpr, SIDE: tl.constexpr, TO_RECORDS: tl.constexpr,
):
    """grid (n * ROWS,): a program copies the key header, the counts and the pages of one head of one block to their
    places in the block's record, or back; with a block's first head also the query count.

    All in words of 4 bytes: pages `[num_pages, PAGE]`, headers `[num_blocks, ROWS, HEADER]`, counts
    `[num_blocks, ROWS]`, records `stride` apart. ids, places int64 `[n, ROWS * ENTRIES]`. Counts are not read back,
    because the blocks got them when their pages were taken.
    """
    entry = tl.arange(0, SIDE)
    row = tl.program_id(0).to(tl.int64)
    page_ids = tl.load(ids + row * ENTRIES + entry, mask=entry < ENTRIES, other=0)
    page_places = tl.load(places + row * ENTRIES + entry, mask=entry < ENTRIES, other=-1)
    n = row // ROWS
    head = row % ROWS
    record = records + n * stride
    block = tl.load(blocks + n)
    header = headers + (block * ROWS + head) * HEADER
    stored_header = record + HEADERS_AT + head * HEADER
    if TO_RECORDS:
        _copy_words(header, stored_header, HEADER, CHUNK, HEADER_REST)
        tl.store(record + COUNTS_AT + head, tl.load(counts + block * ROWS + head))
        if head == 0:
            tl.store(record + QUERIES_AT, tl.load(query_counts + block))
    else:
        _copy_words(stored_header, header, HEADER, CHUNK, HEADER_REST)
        if head == 0:
            tl.store(query_counts + block, tl.load(record + QUERIES_AT))
    # A head's places begin with its pages.
    for e in range(tl.sum((page_places >= 0).to(tl.int32))):
        page = pages + tl.sum(tl.where(entry == e, page_ids, 0)) * PAGE
        stored = record + PAGES_AT + tl.sum(tl.where(entry == e, page_places, 0)) * PAGE
        if TO_RECORDS:
            _copy_words(page, stored, PAGE, CHUNK, PAGE_REST)
        else:
            _copy_words(stored, page, PAGE, CHUNK, PAGE_REST)


def _copy(store: PageStore, blocks: torch.Tensor, records: torch.Tensor, places: Places, to_records: bool) -> None:
    if not blocks.numel():
        return
    layout, at = store.layout, RecordLayout(store.layout).offsets
    heads, entries = layout.layers * layout.heads, layout.head_pages_bf16
    page, header = layout.page_bytes // 4, layout.header_bytes // 4
    rests = (triton.next_power_of_2(max(1, words % CHUNK)) for words in (page, header))
    words = (x.view(torch.int32) for x in (store.pages, store.headers, store.counts, store.query_counts))
    _copy_records_kernel[(blocks.numel() * heads,)](
        *words, blocks.long(), records.view(torch.int32), *places, records.stride(0) // 4, page, header, heads,
        entries, at["counts"] // 4, at["query_count"] // 4, at["headers"] // 4, at["pages"] // 4, CHUNK, *rests,
        triton.next_power_of_2(entries), to_records, num_warps=WARPS,
    )  # fmt: skip


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


def write_records(store: PageStore, blocks: torch.Tensor, records: torch.Tensor, places: Places) -> None:
    """`reference.write_records` as a kernel. Rows of `records` are a multiple of 4 bytes apart."""
    _copy(store, blocks, records, places, True)


def read_records(store: PageStore, blocks: torch.Tensor, records: torch.Tensor, places: Places) -> None:
    """`reference.read_records` as a kernel. Rows of `records` are a multiple of 4 bytes apart."""
    _copy(store, blocks, records, places, False)
