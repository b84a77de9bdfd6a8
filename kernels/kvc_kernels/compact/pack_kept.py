"""Packing of the kept tokens of a prompt or of a part of it, gathered from all of its blocks into a few.

Without waiting for the device. A kernel encodes uncompressed heads on a GPU, plain torch everything else.
"""

from __future__ import annotations

import torch

from ..common import quant
from ..common.bits import bf16_rows, key_bytes, unpack_features, value_bytes, value_meta, write_page
from ..common.dispatch import dispatch
from ..formats import BF16
from ..layout import PageLayout
from ..pages.reference import return_pages, take_pages
from ..store import SCRATCH_PAGE, PageStore
from .reference import TEMP_BYTES, TEMP_BYTES_DEFAULT, TEMP_PER_ELEMENT, _encode_rows, _page_shape

SORT_BYTES = 32  # of temporaries per token while a head's tokens are sorted
TABLE_BYTES = 24  # of temporaries per entry of a head's source table, while its pages return


def pack_kept(
    store: PageStore,
    blocks: torch.Tensor,
    kept_blocks: int,
    to_format: int,
    best: torch.Tensor,
    pages: torch.Tensor,
    *,
    packed: int = 0,
    into: torch.Tensor | None = None,
) -> None:
    """Pack the best tokens of `blocks[n]` (distinct, full) into d = `kept_blocks` blocks, and free the rest.

    The first `packed` of `blocks` hold all their tokens in `to_format`; the rest are uncompressed. `into[d]`: block
    ids of the result, each one of `blocks` or one without pages; by default the first d of `blocks`. `best` int32
    `[L, H, d * P]`: token indices among the n * P, best first. `pages` int64 `[L, H]`: whole pages of the high format
    that a head keeps, at most those of d blocks. A head's tokens are stored in the order of their positions, block
    after block, so its last blocks may be empty. Each block has a key header over the tokens that it receives. Tokens
    of a page divide P, and the format has no low tier.

    For a group of heads at a time, rows are read, their pages return to the ring, and new pages are taken. So the ring
    needs no page beyond those of `blocks`.
    """
    layout, d, n, p = store.layout, kept_blocks, blocks.numel(), store.layout.block_tokens
    page, entries = layout.page(store.block_formats[to_format].high), layout.head_pages_bf16
    per_block, rows, device = p // page.tokens, layout.layers * layout.heads, store.device
    into = blocks[:d] if into is None else into
    source = store.table[blocks].flatten(1, 2)  # [n, L * H, E]
    # A head's pages are the first entries of its rows; a packed block has fewer of them.
    page_counts = torch.where(torch.arange(n, device=device) < packed, per_block, entries)
    best, pages = best.reshape(rows, d * p), pages.reshape(rows)
    table = torch.full((d, rows, entries), SCRATCH_PAGE, dtype=torch.int32, device=device)
    headers = torch.empty((d, rows, 2, layout.head_dim), dtype=torch.float16, device=device)
    slot, block = torch.arange(d * p, device=device), torch.arange(d, device=device)
    encode, row_bytes = encode_kept, d * p * layout.head_dim * TEMP_PER_ELEMENT
    if not packed and not layout.has_scores:
        encode = encode_uncompressed.on(store)
        if encode is not encode_kept:
            row_bytes = d * (layout.page_bytes * per_block + p * SORT_BYTES) + n * entries * TABLE_BYTES
    step = max(1, TEMP_BYTES.get(device.type, TEMP_BYTES_DEFAULT) // row_bytes)
    for at in range(0, rows, step):
        part = slice(at, min(at + step, rows))
        ids, m = source[:, part], min(at + step, rows) - at
        valid = slot < pages[part, None] * page.tokens  # [m, d * P]
        tokens = torch.where(valid, best[part], n * p).sort(-1).values.clamp_(max=n * p - 1)
        counts = (pages[part, None] - block * per_block).clamp(0, per_block)  # [m, d]
        packed_headers = (store.headers.flatten(1, 2)[blocks[:packed], part],) if packed else ()
        data, header = encode(store, page, ids, tokens, counts, *packed_headers)
        return_pages(store, ids.transpose(0, 1).flatten(0, 1), page_counts.expand(m, n).flatten())
        taken = take_pages(store, counts.flatten())
        # Entries after a head's count name page 0 and write zeros there.
        store.pages.index_copy_(0, taken[:, :per_block].flatten().long(), data.flatten(0, 1))
        table[:, part] = taken.view(m, d, entries).transpose(0, 1)
        headers[:, part] = header.transpose(0, 1)
    tokens = (pages * page.tokens - block[:, None] * p).clamp(0, p)  # [d, L * H]
    _replace(store, blocks, into, to_format, table, headers, tokens)


def encode_kept(
    store: PageStore,
    page: PageLayout,
    ids: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    packed_headers: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages uint8 `[m, d * pages, page_bytes]` and key headers fp16 `[m, d, 2, D]` of m heads with the tokens `tokens`
    int32 `[m, d * P]` of blocks whose pages are `ids` int32 `[n, m, E]`. A block of a head has the first `counts` int64
    `[m, d]` pages; the others are zero. The first blocks may be packed like the result; `packed_headers` fp16
    `[packed, m, 2, D]` are their key headers."""
    layout, (m, d), p = store.layout, counts.shape, store.layout.block_tokens
    k, v = (x.view(m * d, p, layout.head_dim) for x in _rows(store, page, ids, tokens.long(), packed_headers))
    valid = torch.arange(p, device=store.device) < counts.view(-1, 1) * page.tokens
    header = quant.key_header(k, valid)
    coded = _page_shape(_encode_rows(page, k, v, header), p // page.tokens)
    data = write_page(page, coded, valid.unflatten(1, (p // page.tokens, -1)))
    return data.view(m, -1, layout.page_bytes), header.view(m, d, 2, -1)


# For heads that are wholly uncompressed and have no scores.
encode_uncompressed = dispatch(encode_kept, "compact.kept_kernel:encode_kept_triton")


def _replace(
    store: PageStore,
    blocks: torch.Tensor,
    into: torch.Tensor,
    to_format: int,
    table: torch.Tensor,
    headers: torch.Tensor,
    tokens: torch.Tensor,
) -> None:
    """Free `blocks`, and give `into[d]` the pages `table` `[d, L * H, E]`, key headers and token counts."""
    shape = (into.numel(), store.layout.layers, store.layout.heads)
    store.table.index_fill_(0, blocks, SCRATCH_PAGE)
    store.counts.index_fill_(0, blocks, 0)
    store.format_id.index_fill_(0, blocks, -1)
    store.table[into] = table.view(*shape, -1)
    store.headers[into] = headers.view(*shape, 2, -1)
    store.counts[into] = torch.stack((tokens, torch.zeros_like(tokens)), -1).to(torch.int16).view(*shape, 2)
    store.format_id.index_fill_(0, into, to_format)


def _rows(
    store: PageStore, page: PageLayout, ids: torch.Tensor, token: torch.Tensor, packed_headers: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """K, V `[m, N, D]` of the tokens `token[m, N]` of m heads. For `ids` and `packed_headers` see `encode_kept`."""
    p, plain = store.layout.block_tokens, store.layout.page(BF16)
    packed = 0 if packed_headers is None else len(packed_headers)
    head, block, place = torch.arange(ids.shape[1], device=store.device)[:, None], token // p, token % p
    if packed < ids.shape[0]:
        at_page = ids[block, head, place // plain.tokens].long()
        rows = tuple(x[at_page, place % plain.tokens] for x in bf16_rows(plain, store.pages, store.dtype))
        if packed_headers is None:
            return rows
    at_page = ids[block, head, place // page.tokens].long()
    header = packed_headers[block.clamp(max=packed - 1), head]
    coded = _dequantize(store, page, at_page, place % page.tokens, header)
    if packed == ids.shape[0]:
        return coded
    # If a block has the other format, these bytes are meaningless.
    is_packed = (block < packed).unsqueeze(-1)
    return tuple(torch.where(is_packed, a, b) for a, b in zip(coded, rows))


def _dequantize(
    store: PageStore, page: PageLayout, at_page: torch.Tensor, slot: torch.Tensor, header: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 K, V `[m, N, D]` of the tokens in slots `slot[m, N]` of packed pages `at_page[m, N]`, which have the key
    headers fp16 `[m, N, 2, D]`."""
    f = page.format
    k = unpack_features(key_bytes(page, store.pages)[at_page, slot], f.key_bits)
    v = unpack_features(value_bytes(page, store.pages)[at_page, :, slot], f.value_bits)
    meta = value_meta(page, store.pages)[at_page, :, :, slot]
    k = quant.dequantize_keys(k.unsqueeze(-2), header, f.key_bits)
    return k.squeeze(-2), quant.dequantize_tokens(v.unsqueeze(-2), meta.unsqueeze(-1)).squeeze(-2)
