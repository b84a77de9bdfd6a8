"""Packing of the tokens that a whole prompt keeps: gathered from all of its blocks into the first few.

Plain torch on every device; nothing here waits for one.
"""

from __future__ import annotations

import torch

from ..common import quant
from ..common.bits import bf16_rows, write_page
from ..layout import BF16
from ..pages.reference import return_pages, take_pages
from ..store import SCRATCH_PAGE, PageStore
from .reference import TEMP_BYTES, TEMP_BYTES_DEFAULT, TEMP_PER_ELEMENT, _encode_rows, _page_shape


def pack_kept(
    store: PageStore, blocks: torch.Tensor, kept_blocks: int, to_format: int, best: torch.Tensor, pages: torch.Tensor
) -> None:
    """Pack the best tokens of `blocks[n]` (distinct, full, uncompressed) into the first d = `kept_blocks` of them, and
    free the others.

    `best` int32 `[L, H, d * P]`: token indices among the n * P, best first. `pages` int64 `[L, H]`: whole pages of the
    high format that a head keeps, at most those of d blocks. A head's tokens are stored in the order of their
    positions, block after block, so that its last blocks may hold none. Each block has a key header over the tokens
    that it receives. Tokens of a page divide P, and the format has no low tier.

    The rows of some heads are read before their pages return to the ring, and written to pages taken after that, so
    no page beyond those of `blocks` is needed.
    """
    layout, d, n, p = store.layout, kept_blocks, blocks.numel(), store.layout.block_tokens
    page, plain, entries = layout.page(store.block_formats[to_format].high), layout.page(BF16), layout.head_pages_bf16
    per_block, rows, device = p // page.tokens, layout.layers * layout.heads, store.device
    source = store.table[blocks].flatten(1, 2)  # [n, L * H, E]
    best, pages = best.reshape(rows, d * p), pages.reshape(rows)
    table = torch.full((d, rows, entries), SCRATCH_PAGE, dtype=torch.int32, device=device)
    headers = torch.empty((d, rows, 2, layout.head_dim), dtype=torch.float16, device=device)
    keys, values = bf16_rows(plain, store.pages, store.dtype)  # [pages, T, D]
    slot, block = torch.arange(d * p, device=device), torch.arange(d, device=device)
    limit = TEMP_BYTES.get(device.type, TEMP_BYTES_DEFAULT)
    step = max(1, limit // (d * p * layout.head_dim * TEMP_PER_ELEMENT))
    for at in range(0, rows, step):
        part = slice(at, min(at + step, rows))
        ids, m = source[:, part], min(at + step, rows) - at
        valid = slot < pages[part, None] * page.tokens  # [m, d * P]
        token = torch.where(valid, best[part], n * p).sort(-1).values.clamp_(max=n * p - 1).long()
        place = token % p
        at_page = ids[token // p, torch.arange(m, device=device)[:, None], place // plain.tokens].long()
        k, v = (x[at_page, place % plain.tokens].view(m * d, p, layout.head_dim) for x in (keys, values))
        valid = valid.view(m * d, p)
        header = quant.key_header(k, valid)
        coded = _page_shape(_encode_rows(page, k, v, header), per_block)
        data = write_page(page, coded, valid.unflatten(1, (per_block, -1)))
        return_pages(store, ids.transpose(0, 1).flatten(0, 1), torch.full((m * n,), entries, device=device))
        counts = (pages[part, None] - block * per_block).clamp(0, per_block)  # [m, d]
        taken = take_pages(store, counts.flatten())
        # Entries behind a head's count name page 0 and write zeros there.
        store.pages.index_copy_(0, taken[:, :per_block].flatten().long(), data.flatten(0, 1))
        table[:, part] = taken.view(m, d, entries).transpose(0, 1)
        headers[:, part] = header.view(m, d, 2, -1).transpose(0, 1)
    kept, freed, shape = blocks[:d], blocks[d:], (d, layout.layers, layout.heads)
    tokens = (pages * page.tokens - block[:, None] * p).clamp(0, p)  # [d, L * H]
    store.table[kept] = table.view(*shape, -1)
    store.headers[kept] = headers.view(*shape, 2, -1)
    store.counts[kept] = torch.stack((tokens, torch.zeros_like(tokens)), -1).to(torch.int16).view(*shape, 2)
    store.format_id.index_fill_(0, kept, to_format)
    store.table.index_fill_(0, freed, SCRATCH_PAGE)
    store.counts.index_fill_(0, freed, 0)
    store.format_id.index_fill_(0, freed, -1)
