"""Dense reads of stored blocks in token order: rows, scores, tiers, and a digest of the bytes.

Without `format_id`, the common format of all blocks, these read the storage formats on the host, so they do not fit a
step's critical path.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch

from ..common import quant
from ..compact.reference import _Source, read_bf16, read_tiers
from ..formats import BF16
from ..store import PageStore
from .reference import block_tier_pages, table_order
from .tiers import HIGH, TokenPlaces, segment_rows, slot_tiers, tier_slots, token_places, token_slots


def _by_format(
    store: PageStore, blocks: torch.Tensor, format_id: int | None, outs: list[torch.Tensor], fill: Callable
) -> None:
    """Call `fill(format_id, blocks) -> tensors` once per storage format among `blocks` and write its rows to `outs`."""
    if format_id is not None:
        for out, x in zip(outs, fill(format_id, blocks)):
            out.copy_(x)
        return
    format_ids = store.format_id[blocks].tolist()
    if any(r < 0 for r in format_ids):
        raise ValueError(f"block {int(blocks[[r < 0 for r in format_ids].index(True)])} is free")
    for r in sorted(set(format_ids)):
        rows = torch.tensor([i for i, x in enumerate(format_ids) if x == r], device=store.device)
        for out, x in zip(outs, fill(r, blocks[rows])):
            out[rows] = x


def dequantize_source(s: _Source, header: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 K, V `[m, S, D]` of one stored tier; header fp16 `[m, 2, D]`."""
    k = quant.dequantize_keys(s.rows.keys, header, s.format.key_bits)
    return k, quant.dequantize_tokens(s.rows.values, s.rows.value_meta.movedim(1, -1))


def load_dense(
    store: PageStore, layer: int, blocks: torch.Tensor, format_id: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K, V fp32 `[n, H, P, D]` and tier int8 `[n, H, P]` (2 high, 1 low, 0 pruned) of `blocks[n]` of one layer.

    Pruned tokens read as 0. Layouts without scores store no positions: their tokens come in stored order (high, then
    low), with tier 0 after them. Slots of an open bf16 block that were never written are undefined.
    """
    g = store.layout
    n, p = blocks.numel(), g.block_tokens
    k = torch.zeros((n, g.heads, p, g.head_dim), device=store.device)
    v = torch.zeros_like(k)
    tier = torch.zeros((n, g.heads, p), dtype=torch.int8, device=store.device)

    def fill(r, ids):
        table = store.table[ids, layer].flatten(0, 1)
        if r == 0:
            rows = read_bf16(store, table)
            parts = rows.keys.float(), rows.values.float(), torch.full_like(tier[0, :1, :1], HIGH)
            return (
                x.expand(table.shape[0], *x.shape[1:]).reshape(ids.numel(), g.heads, -1, *x.shape[2:]) for x in parts
            )
        placed = tier_slots(store, store.block_formats[r], table, store.counts[ids, layer].flatten(0, 1).long())
        header = store.headers[ids, layer].flatten(0, 1)
        dense = [dequantize_source(s, header) for s in read_tiers(store, placed)]
        slots = token_slots(placed, p)
        at, stored = slots.clamp(min=0), (slots >= 0)
        out = []
        for j in (0, 1):
            x = torch.cat([d[j] for d in dense], 1)
            x = x.gather(1, at.unsqueeze(-1).expand(*at.shape, g.head_dim)).masked_fill_(~stored.unsqueeze(-1), 0)
            out.append(x.unflatten(0, (-1, g.heads)))
        out.append(slot_tiers(slots, placed[0].valid.shape[1]).unflatten(0, (-1, g.heads)))
        return out

    _by_format(store, blocks, format_id, [k, v, tier], fill)
    return k, v, tier


def block_tiers(
    store: PageStore, blocks: torch.Tensor, format_id: int | None = None, places: TokenPlaces | None = None
) -> torch.Tensor:
    """Tiers int8 `[n, L, H, P]` of stored tokens, in token order (stored order in unscored layouts); bf16: all 2.

    `places`: those of all blocks, if they are known."""
    g = store.layout
    n, p = blocks.numel(), g.block_tokens
    out = torch.zeros((n, g.layers, g.heads, p), dtype=torch.int8, device=store.device)

    def fill(r, ids):
        if r == 0:
            return (torch.full_like(out[: ids.numel()], HIGH),)
        tiers, slots = places or token_places(store, ids, r)
        return (slot_tiers(slots, tiers[0].valid.shape[1]).view(-1, *out.shape[1:]),)

    _by_format(store, blocks, format_id, [out], fill)
    return out


def block_scores(
    store: PageStore, blocks: torch.Tensor, format_id: int | None = None, places: TokenPlaces | None = None
) -> torch.Tensor:
    """Scores fp32 `[n, L, H, P]` of `blocks[n]` in token order, 0 for pruned tokens. ValueError in unscored layouts.

    `places`: those of all blocks, if they are known."""
    g = store.layout
    if not g.has_scores:
        raise ValueError("this layout keeps no scores")
    n, p = blocks.numel(), g.block_tokens
    out = torch.zeros((n, g.layers, g.heads, p), device=store.device)

    def fill(r, ids):
        if r == 0:
            table = store.table[ids].flatten(0, 2)
            x = segment_rows(store, g.page(BF16), "scores", torch.float32, table)[:, :p]
            return (x.reshape(-1, *out.shape[1:]),)
        tiers, slots = places or token_places(store, ids, r)
        stored = torch.cat([segment_rows(store, t.page, "scores", torch.float32, t.ids) for t in tiers], 1)
        x = stored.gather(1, slots.clamp(min=0)).masked_fill_(slots < 0, 0)
        return (x.view(-1, *out.shape[1:]),)

    _by_format(store, blocks, format_id, [out], fill)
    return out


def block_digest(store: PageStore, block: int, *, scores: bool = True, tokens: int | None = None) -> str:
    """sha256 (hex) over the stored content of one block: format id, counts, key header, page bytes in (layer, head,
    table) order.

    Page ids and undefined bytes do not enter: a bf16 block counts the first `tokens` (default P) K/V rows and scores,
    and no header. Packed pages count whole, because their padding is zero. `scores=False` omits the score segments, to
    which attention adds after packing.
    """
    g = store.layout
    format_id = int(store.format_id[block])
    if format_id < 0:
        raise ValueError(f"block {block} is free")
    digest = hashlib.sha256(bytes([format_id]))
    blocks = torch.tensor([block], device=store.device)
    if format_id == 0:
        n = g.block_tokens if tokens is None else tokens
        rows = read_bf16(store, store.table[block].flatten(0, 1))
        parts = [rows.keys[:, :n], rows.values[:, :n]] + ([rows.scores[:, :n]] if g.has_scores and scores else [])
    else:
        spec = store.block_formats[format_id]
        high, low = (x.flatten() for x in block_tier_pages(store, blocks))
        ids = table_order(store.table[block].flatten(0, 1), high, low)
        raw = store.pages[ids.long()]
        if g.has_scores and not scores:
            j = torch.arange(ids.shape[1], device=store.device)
            for fmt, of_tier in ((spec.high, j < high.unsqueeze(-1)), (spec.low, j >= high.unsqueeze(-1))):
                if fmt is not None:
                    at, size = g.page(fmt).segments["scores"]
                    raw[..., at : at + size].masked_fill_(of_tier.unsqueeze(-1), 0)
        live = torch.arange(ids.shape[1], device=store.device) < (high + low).unsqueeze(-1)
        parts = [store.counts[block], raw[live], store.headers[block]]
    for x in parts:
        digest.update(x.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()
