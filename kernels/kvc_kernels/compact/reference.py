"""Compaction in plain torch: take pages, gather, quantize, pack, rewrite the table, recycle the source pages.

The bytes written are a pure function of a block's own rows, its tiers and the target storage format. They do not depend
on page ids or other blocks, so equal prefixes give equal bytes, wherever and whenever they are packed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..common import quant
from ..common.bits import PageRows, bf16_rows, read_page, segment, write_page
from ..formats import BF16, Format
from ..layout import BlockFormat, PageLayout, PoolLayout
from ..pages.gather import gather_pages
from ..pages.reference import block_tier_pages, return_pages, table_order, table_rows, take_pages, tier_pages
from ..pages.tiers import HIGH, LOW, PRUNED, TierSlots, tier_slots, token_slots
from ..store import SCRATCH_PAGE, PageStore
from ..tiering.quota import keep_all

# Bytes of temporaries per chunk of rows (a row is one head of one block). On the CPU smaller chunks stay in cache.
TEMP_BYTES = {"cpu": 24 << 20}
TEMP_BYTES_DEFAULT = 256 << 20
TEMP_PER_ELEMENT = 26  # measured bytes of temporaries per element of a row (P * D elements), K and V together


class _Source(NamedTuple):
    """One tier of the source with its slots flattened: `rows` have leading dims `[m, S]`."""

    format: Format
    rows: PageRows


def check_block_format(layout: PoolLayout, block_format: BlockFormat) -> None:
    """ValueError if some split of P tokens over the block format's tiers overflows a table row."""
    p = layout.block_tokens
    if block_format.low is None:
        worst = layout.pages_for(block_format.high, p)
    else:
        worst = max(
            layout.pages_for(block_format.high, n) + layout.pages_for(block_format.low, p - n) for n in range(p + 1)
        )
    if worst > layout.head_pages_bf16:
        names = block_format.high.name + (f"+{block_format.low.name}" if block_format.low else "")
        raise ValueError(
            f"{names} may take {worst} pages per head, but a table row has {layout.head_pages_bf16} entries; "
            f"choose a page size other than {layout.page_bytes} bytes"
        )


def _flat_slots(rows: PageRows) -> PageRows:
    """Rows read from `[m, pages, page_bytes]` with the page and slot dimensions merged: `[m, S, ...]`.

    Metas change from the page's `[..., T]` to token-major: value_meta `[m, S, G, 2]`.
    """
    return PageRows(
        keys=rows.keys.flatten(1, 2),
        values=rows.values.flatten(1, 2),
        value_meta=None if rows.value_meta is None else rows.value_meta.movedim(-1, 2).flatten(1, 2),
        scores=None if rows.scores is None else rows.scores.flatten(1, 2),
        positions=None if rows.positions is None else rows.positions.flatten(1, 2),
    )


def read_tiers(store: PageStore, tiers: list[TierSlots]) -> list[_Source]:
    """Codes and metas of the tiers' slots; invalid slots are undefined."""
    return [
        _Source(t.page.format, _flat_slots(read_page(t.page, gather_pages(store, t.ids), store.dtype))) for t in tiers
    ]


def read_bf16(store: PageStore, row_table: torch.Tensor) -> PageRows:
    """P tokens of m uncompressed heads, `row_table` `[m, E]`: keys, values `[m, P, D]`, scores `[m, P]`."""
    page, p = store.layout.page(BF16), store.layout.block_tokens
    raw = gather_pages(store, row_table.long())
    k, v = bf16_rows(page, raw, store.dtype)
    scores = segment(page, raw, "scores", torch.float32)
    return PageRows(
        keys=k.flatten(1, 2)[:, :p],
        values=v.flatten(1, 2)[:, :p],
        scores=None if scores is None else scores.flatten(1, 2)[:, :p],
    )


def _pick(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """x `[m, S, ...]` at index `[m, N]` -> `[m, N, ...]`, by one flat row gather."""
    m, s = x.shape[:2]
    flat = index + torch.arange(m, device=x.device).unsqueeze(-1) * s
    return x.reshape(m * s, *x.shape[2:]).index_select(0, flat.flatten()).view(*index.shape, *x.shape[2:])


def _order(chosen: torch.Tensor, slots: int) -> torch.Tensor:
    """Token of each destination slot, int64 `[m, slots]`: `chosen` (bool `[m, P]`) in position order, then 0."""
    m, p = chosen.shape
    rank = chosen.cumsum(1) - 1
    order = rank.new_zeros((m, slots + 1))
    tokens = torch.arange(p, device=chosen.device).expand(m, p)
    order.scatter_(1, torch.where(chosen, rank, slots), tokens)
    return order[:, :slots]


def _encode_rows(page: PageLayout, k: torch.Tensor, v: torch.Tensor, header: torch.Tensor) -> PageRows:
    """Codes of bf16 rows `[m, N, D]` for `page`; header fp16 `[m, 2, D]`."""
    f = page.format
    keys = quant.quantize_keys(k, header, f.key_bits)
    values, vmeta = quant.quantize_tokens(v, f.value_bits, page.value_groups)
    return PageRows(keys, values, vmeta)


def _convert_rows(page: PageLayout, s: _Source, index: torch.Tensor) -> PageRows:
    """Rows of one source tier at slots `index[m, N]` in the format of `page`. Values are requantized if their bits
    change.
    """
    f = page.format
    keys = quant.convert_codes(_pick(s.rows.keys, index), s.format.key_bits, f.key_bits)
    values = _pick(s.rows.values, index)
    vmeta = _pick(s.rows.value_meta, index).movedim(1, -1)
    if s.format.value_bits != f.value_bits:
        values, vmeta = quant.quantize_tokens(quant.dequantize_tokens(values, vmeta), f.value_bits, page.value_groups)
    return PageRows(keys, values, vmeta)


def _merge_rows(take_second: torch.Tensor, a: PageRows, b: PageRows) -> PageRows:
    """`b` where bool `[m, N]` is set, else `a`, slot by slot."""
    row, meta = take_second.unsqueeze(-1), take_second.unsqueeze(-2)
    return PageRows(
        keys=torch.where(row, b.keys, a.keys),
        values=torch.where(row, b.values, a.values),
        value_meta=torch.where(meta.unsqueeze(-3), b.value_meta, a.value_meta),
    )


def _page_shape(rows: PageRows, pages: int) -> PageRows:
    """Slots `[m, N, ...]` split into pages `[m, pages, T, ...]`; metas into `[m, pages, ..., T]`."""

    def split(x, dim):
        return None if x is None else x.unflatten(dim, (pages, -1)).movedim(dim if dim >= 0 else dim - 1, 1)

    return PageRows(
        keys=split(rows.keys, 1),
        values=split(rows.values, 1),
        value_meta=split(rows.value_meta, -1),
        scores=split(rows.scores, 1),
        positions=split(rows.positions, 1),
    )


def _move(
    store: PageStore,
    to: BlockFormat,
    source: BlockFormat,
    row_table: torch.Tensor,
    row_counts: torch.Tensor,
    chosen: list[torch.Tensor],
    dest_ids: list[torch.Tensor],
) -> torch.Tensor | None:
    """Move m heads: gather the chosen tokens of each tier, encode, write pages `dest_ids[tier] [m, pages]`.

    `chosen[tier]` bool `[m, P]`. Returns the new key headers `[m, 2, D]` if the source is uncompressed, else None.
    """
    layout, p = store.layout, store.layout.block_tokens
    header = None
    if source.high.packed:
        placed = tier_slots(store, source, row_table, row_counts)
        sources = read_tiers(store, placed)
        slots = token_slots(placed, p).clamp_(min=0)
        scores = None
        if layout.has_scores:
            scores = torch.cat([s.rows.scores for s in sources], 1)
        first = placed[0].valid.shape[1]
    else:
        plain = read_bf16(store, row_table)
        scores = plain.scores
        kept = chosen[0] if to.low is None else chosen[0] | chosen[1]
        header = quant.key_header(plain.keys, kept)
    for tier, fmt in enumerate((to.high, to.low)):
        if fmt is None:
            continue
        page, pages = layout.page(fmt), dest_ids[tier].shape[1]
        order = _order(chosen[tier], pages * page.tokens)
        n = chosen[tier].sum(1, keepdim=True)
        valid = torch.arange(order.shape[1], device=store.device) < n
        if source.high.packed:
            at = slots.gather(1, order)
            rows = _convert_rows(page, sources[0], at.clamp(max=first - 1))
            if len(sources) > 1:
                other = _convert_rows(page, sources[1], (at - first).clamp_(min=0))
                rows = _merge_rows(at >= first, rows, other)
        else:
            at = order
            rows = _encode_rows(page, _pick(plain.keys, at), _pick(plain.values, at), header)
        if layout.has_scores:
            rows = rows._replace(scores=scores.gather(1, at), positions=order.to(torch.int16))
        data = write_page(page, _page_shape(rows, pages), valid.unflatten(1, (pages, -1)))
        # Entries after a head's count name page 0 and write the same zeros there.
        store.pages.index_copy_(0, dest_ids[tier].flatten(), data.flatten(0, 1))
    return header


def _destinations(
    store: PageStore, to: BlockFormat, ids: torch.Tensor, high: torch.Tensor, low: torch.Tensor
) -> list[torch.Tensor]:
    """Pages of the high and of the low tier of each head, int64 `[m, pages]` each, SCRATCH_PAGE after their counts
    `high` and `low` `[m]`. `ids` `[m, E]` are the pages of both tiers, high ones first."""
    dest = []
    for num_pages, start, fmt in ((high, None, to.high), (low, high, to.low)):
        if fmt is None:
            dest.append(ids.new_zeros((len(ids), 0)).long())
            continue
        j = torch.arange(store.layout.pages_for(fmt, store.layout.block_tokens), device=store.device)
        at = j.expand(len(ids), -1) if start is None else (start.unsqueeze(-1) + j).clamp(max=ids.shape[1] - 1)
        dest.append(torch.where(j < num_pages.unsqueeze(-1), ids.gather(1, at), SCRATCH_PAGE).long())
    return dest


def compact(
    store: PageStore, blocks: torch.Tensor, to_format: int, tiers: torch.Tensor | None, *, from_format: int
) -> torch.Tensor:
    """Move `blocks[n]` (distinct, full, at `from_format`) to packed format `to_format` and keep the tokens that `tiers`
    selects.

    `tiers` int8 `[n, L, H, P]` by token position: 2 high, 1 low (dropped if the block format has no low format), 0
    pruned; None means all high. Tokens that the source does not hold stay pruned. High tokens are stored in position
    order, then the low ones. From bf16 the key header is computed over the kept tokens. From a packed block format the
    header is frozen: key codes are copied or mapped code to code to fewer bits, and values are requantized only if
    their bits change. Scores and positions are carried over. Destination pages are taken before source pages return, so
    both must fit at once.

    Returns int32 `[n]`: pages of each block afterwards. ValueError if `to_format` is not a packed block format or may
    overflow a table row.
    """
    layout = store.layout
    to, source = store.block_formats[to_format], store.block_formats[from_format]
    if not to.high.packed:
        raise ValueError(f"block format {to_format} is not packed")
    check_block_format(layout, to)
    blocks = blocks.long()
    n, p = blocks.numel(), layout.block_tokens
    m = n * layout.layers * layout.heads
    if not n:
        return store.ring.new_zeros(0)
    old_table = store.table[blocks].view(m, -1)
    old_counts = store.counts[blocks].view(m, 2).long()
    old_high, old_low = (x.flatten() for x in block_tier_pages(store, blocks))
    tiers = (keep_all(n, layout, store.device) if tiers is None else tiers).reshape(m, p)
    if source.high.packed:
        stored = token_slots(tier_slots(store, source, old_table, old_counts), p) >= 0
        tiers = torch.where(stored, tiers, PRUNED)
    counts = torch.stack(((tiers == HIGH).sum(1), (tiers == LOW).sum(1) * (1 if to.low is not None else 0)), 1)

    high, low = tier_pages(store, to, counts)
    ids = take_pages(store, high + low)
    dest = _destinations(store, to, ids, high, low)
    limit = TEMP_BYTES.get(store.device.type, TEMP_BYTES_DEFAULT)
    step = max(1, limit // (p * layout.head_dim * TEMP_PER_ELEMENT))
    headers = []
    for i in range(0, m, step):
        part = slice(i, min(i + step, m))
        chosen = [tiers[part] == HIGH, tiers[part] == LOW]
        headers.append(_move(store, to, source, old_table[part], old_counts[part], chosen, [d[part] for d in dest]))
    if headers[0] is not None:
        store.headers[blocks] = torch.cat(headers).view(n, *store.headers.shape[1:])

    store.table[blocks] = table_rows(ids, high, low).view(n, *store.table.shape[1:])
    store.counts[blocks] = counts.to(torch.int16).view(n, *store.counts.shape[1:])
    store.format_id.index_fill_(0, blocks, to_format)
    return_pages(store, table_order(old_table, old_high, old_low), old_high + old_low)
    return (high + low).view(n, -1).sum(1).to(torch.int32)

