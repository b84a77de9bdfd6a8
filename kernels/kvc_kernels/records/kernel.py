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
WARPS = 4


@triton.jit
def _copy_words(source, target, WORDS: tl.constexpr, CHUNK: tl.constexpr):
    for at in tl.static_range(0, WORDS, CHUNK):
        word = at + tl.arange(0, CHUNK)
        tl.store(target + word, tl.load(source + word, mask=word < WORDS), mask=word < WORDS)


# The blocks of one buffer are a slice of those of an operation. Its alignment must not select another compiled kernel.
@triton.jit(do_not_specialize_on_alignment=["blocks"])
def _copy_records_kernel(
    pages, headers, counts, query_counts, blocks, records, ids, places, stride,
    PAGE: tl.constexpr, HEADER: tl.constexpr, ROWS: tl.constexpr, ENTRIES: tl.constexpr, COUNTS_AT: tl.constexpr,
    QUERIES_AT: tl.constexpr, HEADERS_AT: tl.constexpr, PAGES_AT: tl.constexpr, CHUNK: tl.constexpr,
    TO_RECORDS: tl.constexpr,
):
    """grid (n * ROWS * (ENTRIES + 1),): program (block, head, entry) copies one page to its place in the block's
    record, or back; the last entry of a head is its key header, and of the first head also counts and query count.

    All in words of 4 bytes: pages `[num_pages, PAGE]`, headers `[num_blocks, ROWS, HEADER]`, counts
    `[num_blocks, ROWS]`, records `stride` apart. ids, places int64 `[n, ROWS * ENTRIES]`. Counts are not read back:
    the blocks have them since their pages were taken.
    """
    i = tl.program_id(0).to(tl.int64)
    entry = i % (ENTRIES + 1)
    row = i // (ENTRIES + 1)
    n = row // ROWS
    head = row % ROWS
    record = records + n * stride
    if entry < ENTRIES:
        at = row * ENTRIES + entry
        place = tl.load(places + at)
        if place >= 0:
            page = pages + tl.load(ids + at) * PAGE
            stored = record + PAGES_AT + place * PAGE
            if TO_RECORDS:
                _copy_words(page, stored, PAGE, CHUNK)
            else:
                _copy_words(stored, page, PAGE, CHUNK)
    else:
        block = tl.load(blocks + n)
        header = headers + (block * ROWS + head) * HEADER
        stored = record + HEADERS_AT + head * HEADER
        if TO_RECORDS:
            _copy_words(header, stored, HEADER, CHUNK)
            tl.store(record + COUNTS_AT + head, tl.load(counts + block * ROWS + head))
        else:
            _copy_words(stored, header, HEADER, CHUNK)
        if head == 0:
            if TO_RECORDS:
                tl.store(record + QUERIES_AT, tl.load(query_counts + block))
            else:
                tl.store(query_counts + block, tl.load(record + QUERIES_AT))


def _copy(store: PageStore, blocks: torch.Tensor, records: torch.Tensor, places: Places, to_records: bool) -> None:
    if not blocks.numel():
        return
    layout, at = store.layout, RecordLayout(store.layout).offsets
    rows, entries = layout.layers * layout.heads, layout.head_pages_bf16
    words = (x.view(torch.int32) for x in (store.pages, store.headers, store.counts, store.query_counts))
    _copy_records_kernel[(blocks.numel() * rows * (entries + 1),)](
        *words, blocks.long(), records.view(torch.int32), *places, records.stride(0) // 4, layout.page_bytes // 4,
        layout.header_bytes // 4, rows, entries, at["counts"] // 4, at["query_count"] // 4, at["headers"] // 4,
        at["pages"] // 4, CHUNK, to_records, num_warps=WARPS,
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
