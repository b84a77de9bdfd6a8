"""Plans: which token of which head is stored high (2), low (1) or pruned (0). Tensors int8 `[n, L, H, P]`."""

from __future__ import annotations

import torch

from ..layout import PoolLayout
from .tiers import HIGH, LOW, PRUNED


def keep_all(n: int, layout: PoolLayout, device: torch.device | str = "cpu") -> torch.Tensor:
    """Tiers int8 `[n, L, H, P]` that keep every token high: for rungs that only quantise."""
    shape = (n, layout.layers, layout.heads, layout.block_tokens)
    return torch.full(shape, HIGH, dtype=torch.int8, device=device)


def _ranks(values: torch.Tensor, member: torch.Tensor | None = None) -> torch.Tensor:
    """Rank along the last dim, best value first, equal values by position; non-members behind all members."""
    if member is not None:
        values = values.masked_fill(~member, -torch.inf)
    order = values.sort(dim=-1, descending=True, stable=True).indices
    place = torch.arange(values.shape[-1], device=values.device).expand(order.shape)
    return torch.empty_like(order).scatter_(-1, order, place)


def quota(scores: torch.Tensor, pages: int, page_tokens: int, floor_pages: int = 1) -> torch.Tensor:
    """Tiers int8 `[n, L, H, P]` (2 or 0) with exactly `pages` pages of `page_tokens` tokens kept per block.

    `scores` fp32 `[n, L, H, P]`, higher is kept; a token that is no longer stored should come as -inf. Heads and layers
    compete in units of pages (KV-Compress, section 4.2): a head's tokens are sorted by score (ties by position), page j
    is its tokens j*T..(j+1)*T-1 in that order and is worth its best token. Every head gets `floor_pages` pages, the
    rest go to the pages worth most, ties by (layer, head, page). ValueError when `pages` is less than the floors or
    more than the block has.
    """
    n, layers, heads, tokens = scores.shape
    per_head = -(-tokens // page_tokens)
    floor = min(floor_pages, per_head)
    rest = pages - layers * heads * floor
    if rest < 0 or pages > layers * heads * per_head:
        least, most = layers * heads * floor, layers * heads * per_head
        raise ValueError(f"a quota of {pages} pages is not within {least}..{most} for this block")
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    worth = ranked[..., floor * page_tokens :: page_tokens].reshape(n, -1)
    # A head's pages are worth less and less, and ties go to the lower page: those chosen are always a prefix.
    won = (_ranks(worth) < rest).view(n, layers, heads, per_head - floor).sum(-1)
    kept = ((won + floor) * page_tokens).unsqueeze(-1)
    place = torch.arange(tokens, device=scores.device)
    tiers = torch.where(place < kept, HIGH, PRUNED).to(torch.int8)
    return torch.empty_like(tiers).scatter_(-1, order, tiers)


def _tier_pages(tiers: torch.Tensor, high_tokens: int, low_tokens: int) -> torch.Tensor:
    """Pages `[n, L, H]` that tiers `[n, L, H, P]` need."""
    high, low = (tiers == HIGH).sum(-1), (tiers == LOW).sum(-1)
    return (high + high_tokens - 1) // high_tokens + (low + low_tokens - 1) // low_tokens


def threshold(
    significance: torch.Tensor,
    divisor: torch.Tensor,
    alpha_high: float,
    alpha_low: float,
    ceiling: torch.Tensor,
    high_tokens: int,
    low_tokens: int,
    max_pages: torch.Tensor | None = None,
) -> torch.Tensor:
    """Tiers int8 `[n, L, H, P]` by LeanKV's thresholds (section 4 and Algorithm 1), rounded to whole pages.

    `significance` fp32 `[n, L, H, P]`, `divisor` fp32 `[n, P]` (token position i in the prompt phase, sequence length N
    while generating): high if significance >= alpha_high / divisor, low if >= alpha_low / divisor, else pruned, and
    never above `ceiling` int8 `[n, L, H, P]`: tiers only go down.

    Then what the last pages have left is filled, which costs no byte: the last high page with the best of the tokens
    below that are still stored high (the low ones come first, then pruned ones), the last low page with the best pruned
    ones that are still stored. Best is what comes closest to its threshold, significance * divisor, ties by position.
    `high_tokens`, `low_tokens`: tokens a page of each tier.

    Where a head would then take more than `max_pages` `[n, L, H]` (only when a low page holds fewer tokens than a high
    one) it stays at its ceiling, or keeps its best high tokens when that does not fit either.
    """
    by_token = divisor[:, None, None, :]
    tiers = (significance >= alpha_low / by_token).to(torch.int8)
    tiers = torch.where(significance >= alpha_high / by_token, HIGH, tiers).to(torch.int8)
    tiers = torch.minimum(tiers, ceiling)
    closeness = significance * by_token
    for tier, page_tokens in ((HIGH, high_tokens), (LOW, low_tokens)):
        room = (-(tiers == tier).sum(-1, keepdim=True)) % page_tokens
        candidate = (tiers < tier) & (ceiling >= tier)
        fill = candidate & (_ranks(closeness, candidate) < room)
        tiers = torch.where(fill, tier, tiers).to(torch.int8)
    if max_pages is not None:
        limit = max_pages.to(torch.int64)
        tiers = torch.where((_tier_pages(tiers, high_tokens, low_tokens) > limit).unsqueeze(-1), ceiling, tiers)
        best = (ceiling == HIGH) & (_ranks(closeness, ceiling == HIGH) < (limit * high_tokens).unsqueeze(-1))
        over = (_tier_pages(tiers, high_tokens, low_tokens) > limit).unsqueeze(-1)
        tiers = torch.where(over, best.to(torch.int8) * HIGH, tiers)
    return tiers
