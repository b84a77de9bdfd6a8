"""Locations of packed tokens: page ids, valid slots and token indices of each tier of a block."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..common.bits import segment
from ..layout import BlockFormat, PageLayout
from ..store import SCRATCH_PAGE, PageStore
from .reference import table_order, tier_pages

HIGH, LOW, PRUNED = 2, 1, 0


class TierSlots(NamedTuple):
    """Slots of one tier of m heads; S = pages * T, with the maximum pages of a block."""

    page: PageLayout
    ids: torch.Tensor  # int64 [m, pages], page 0 after the head's last page
    valid: torch.Tensor  # bool [m, S]
    positions: torch.Tensor  # int64 [m, S]: token index within the block; undefined where not valid


def segment_rows(store: PageStore, page: PageLayout, name: str, dtype: torch.dtype, ids: torch.Tensor) -> torch.Tensor:
    """Copy of a per-token segment (scores, positions) of pages `ids[m, pages]` as `[m, pages * T]`."""
    words = segment(page, store.pages, name, dtype)
    return words.index_select(0, ids.flatten()).view(ids.shape[0], -1)


def tier_slots(
    store: PageStore, block_format: BlockFormat, row_table: torch.Tensor, counts: torch.Tensor
) -> list[TierSlots]:
    """Tiers of m packed heads at `block_format`: `row_table` int32 `[m, E]`, `counts` int64 `[m, 2]`.

    In unscored layouts pages hold no positions, and a token's index is its place in stored order, high before low.
    """
    layout, out = store.layout, []
    tier_counts = tier_pages(store, block_format, counts)
    ordered = table_order(row_table, *tier_counts).long()
    for tier, fmt in enumerate((block_format.high, block_format.low)):
        if fmt is None:
            continue
        page = layout.page(fmt)
        j = torch.arange(layout.pages_for(fmt, layout.block_tokens), device=store.device)
        at = tier_counts[0].unsqueeze(-1) + j if tier else j.expand(ordered.shape[0], -1)
        at = at.clamp(max=ordered.shape[1] - 1)
        ids = torch.where(j < tier_counts[tier].unsqueeze(-1), ordered.gather(1, at), SCRATCH_PAGE)
        slot = torch.arange(j.numel() * page.tokens, device=store.device)
        if layout.has_scores:
            positions = segment_rows(store, page, "positions", torch.int16, ids).long()
        else:
            positions = slot + counts[:, :1] if tier else slot.expand(ids.shape[0], -1)
        out.append(TierSlots(page, ids, slot < counts[:, tier : tier + 1], positions))
    return out


def token_slots(tiers: list[TierSlots], tokens: int) -> torch.Tensor:
    """int64 `[m, tokens]`: slot of each token in the concatenated tiers, -1 if it is not stored."""
    m = tiers[0].valid.shape[0]
    slots = tiers[0].positions.new_full((m, tokens + 1), -1)
    base = 0
    for t in tiers:
        tier_range = base + torch.arange(t.valid.shape[1], device=slots.device)
        # Column `tokens` takes the empty slots.
        slots.scatter_(1, torch.where(t.valid, t.positions, tokens), tier_range.expand(t.valid.shape))
        base += t.valid.shape[1]
    return slots[:, :tokens]


class TokenPlaces(NamedTuple):
    """Places of all tokens of n packed blocks; m = n * L * H."""

    tiers: list[TierSlots]
    slots: torch.Tensor  # int64 [m, P]: see `token_slots`


def token_places(store: PageStore, blocks: torch.Tensor, format_id: int) -> TokenPlaces:
    """Places of the tokens of `blocks[n]`, which are all packed at `format_id`."""
    table, counts = store.table[blocks].flatten(0, 2), store.counts[blocks].flatten(0, 2).long()
    tiers = tier_slots(store, store.block_formats[format_id], table, counts)
    return TokenPlaces(tiers, token_slots(tiers, store.layout.block_tokens))


def slot_tiers(slots: torch.Tensor, high_slots: int) -> torch.Tensor:
    """Tier int8 (2, 1, 0) of each token from `token_slots`, with `high_slots` slots in the high tier."""
    stored = (slots >= 0).to(torch.int8)
    return stored + (stored * (slots < high_slots))
