"""Gather and packing of the kept tokens of uncompressed heads, from all blocks of a prompt into a few: two programs per
head and kept block, one for keys and one for values.

The bytes are those of `pack_kept.encode_kept`, by the same arithmetic as `pack_kernel`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.format_class import TOKENS, FormatClass, format_class
from ..formats import BF16
from ..layout import PageLayout
from ..store import PageStore
from .pack_kernel import tier_keys, tier_values, write_header


@triton.jit(do_not_specialize=["kept_blocks", "entries"])
def kept_kernel(
    pages, out, row_table, tokens, counts, ids, headers, like, kept_blocks, entries,
    D: tl.constexpr, P: tl.constexpr, PER_BLOCK: tl.constexpr, page_bytes: tl.constexpr, SOURCE: tl.constexpr,
    TO: tl.constexpr,
):  # fmt: skip
    """grid (2 m d,) for m heads and d = `kept_blocks`. row_table int32 `[m, entries]` source pages, tokens int32
    `[m, d, P]` their slots, numbered from the first page on, counts int32 `[m, d]` tokens of each block, ids int32
    `[PER_BLOCK]` = 0, 1, .., out uint8 `[m, d, PER_BLOCK, page_bytes]`, headers fp16 `[m, d, 2, D]`. SOURCE (bf16), TO:
    `FormatClass` records. A block's slots after its count are zero.
    """
    at = (tl.program_id(0) // 2).to(tl.int64)
    row_table += at // kept_blocks * entries
    out += at * (PER_BLOCK * page_bytes)
    order = tokens + at * P
    n = tl.load(counts + at)
    if tl.program_id(0) % 2 == 0:
        header = headers + at * (2 * D)
        write_header(pages, row_table, n, order, header, like, page_bytes, D, SOURCE[TOKENS], False, 32)
        tier_keys(
            pages, out, row_table, ids, PER_BLOCK, n, order, header, like, page_bytes, D, SOURCE, TO, False, 64,
        )  # fmt: skip
    else:
        tier_values(
            pages, out, row_table, ids, PER_BLOCK, n, order, like, page_bytes, D, SOURCE, TO, False, False, 64
        )


def _classes(store: PageStore, page: PageLayout) -> tuple[FormatClass, FormatClass]:
    key = "kept", page.format.name
    if (cached := store.launch_constants.get(key)) is None:
        plain = store.layout.page(BF16)
        cached = store.launch_constants[key] = format_class(plain), format_class(page)
    return cached


def encode_kept_triton(
    store: PageStore, page: PageLayout, ids: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`pack_kept.encode_kept` of uncompressed blocks whose pages have no scores, in one launch."""
    layout, (m, d), (source, to) = store.layout, counts.shape, _classes(store, page)
    p, per_block = layout.block_tokens, layout.block_tokens // page.tokens
    # The last page of an uncompressed block may have slots after its P tokens.
    slots = tokens + tokens // p * (layout.head_pages_bf16 * source.tokens - p)
    out = torch.empty((m, d * per_block, layout.page_bytes), dtype=torch.uint8, device=store.device)
    header = torch.empty((m, d, 2, layout.head_dim), dtype=torch.float16, device=store.device)
    row_table = ids.transpose(0, 1).flatten(1).contiguous()  # [m, n * E]
    places = torch.arange(per_block, dtype=torch.int32, device=store.device)
    kept_kernel[(2 * m * d,)](
        store.pages, out, row_table, slots.contiguous(), (counts * page.tokens).int(), places, header,
        store.pages.view(store.dtype), d, row_table.shape[1], layout.head_dim, p, per_block, layout.page_bytes, source,
        to, num_warps=4,
    )  # fmt: skip
    return out, header
