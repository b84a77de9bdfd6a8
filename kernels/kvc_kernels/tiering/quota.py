"""Tier plans by quota or threshold: high (2), low (1) or pruned (0) for each token of each head, int8 `[n, L, H, P]`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from ..common.upload import upload
from ..layout import PoolLayout
from ..pages.tiers import HIGH, LOW, PRUNED


def keep_all(n: int, layout: PoolLayout, device: torch.device | str = "cpu") -> torch.Tensor:
    """Tiers int8 `[n, L, H, P]` that keep every token high: for policies that only quantize."""
    shape = (n, layout.layers, layout.heads, layout.block_tokens)
    return torch.full(shape, HIGH, dtype=torch.int8, device=device)


def quota(
    scores: torch.Tensor,
    pages: int | Sequence[int],
    page_tokens: int,
    floor_pages: int | Sequence[int] = 1,
) -> torch.Tensor:
    """Tiers int8 `[n, L, H, P]` (2 or 0) with exactly `pages` pages of `page_tokens` tokens kept per block.

    `scores` fp32 `[n, L, H, P]`; higher scores are kept. A token that is not stored should have the score -inf: its
    head takes it last, only to fill the head's pages, and `compact` drops it. Heads compete in units of pages
    (KV-Compress, section 4.2): a head's tokens are sorted by score (ties by position), page j is its tokens
    j*T..(j+1)*T-1 in that order and is worth its best token. Every head gets `floor_pages` pages, and the rest go to
    the pages worth most, ties by (layer, head, page).

    Competition: with one number all heads of all layers compete; with L numbers the heads of each layer, for that
    layer's pages; with L * H numbers (layer by layer) no heads compete, and each keeps its number. `floor_pages` is one
    number, or one for each of these groups. ValueError if a group's pages are fewer than its floors or more than it
    has.
    """
    n, layers, heads, tokens = scores.shape
    per_head = -(-tokens // page_tokens)
    shares = [pages] if isinstance(pages, int) else list(pages)
    floors = [floor_pages] * len(shares) if isinstance(floor_pages, int) else list(floor_pages)
    floors = [min(f, per_head) for f in floors]
    if len(shares) not in (1, layers, layers * heads) or len(floors) != len(shares):
        raise ValueError(f"{len(shares)} quotas and {len(floors)} floors do not fit {layers} layers of {heads} heads")
    members = layers * heads // len(shares)
    for share, floor in zip(shares, floors):
        if not members * floor <= share <= members * per_head:
            where = "this block" if len(shares) == 1 else f"{members} of its heads"
            raise ValueError(
                f"a quota of {share} pages is not within {members * floor}..{members * per_head} for {where}"
            )
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    worth = ranked[..., ::page_tokens].reshape(n, len(shares), members * per_head)
    share, floor = (_column(tuple(x), scores.device) for x in (shares, floors))
    # A head's pages are in descending order of worth, and ties go to the lower page: the chosen pages are a prefix.
    page = torch.arange(members * per_head, device=scores.device) % per_head
    guaranteed = (page < floor).expand(worth.shape) if any(floors) else None
    won = _ranks_after(worth, guaranteed) < share
    kept = (won.view(n, layers, heads, per_head).sum(-1) * page_tokens).unsqueeze(-1)
    place = torch.arange(tokens, device=scores.device)
    tiers = torch.where(place < kept, HIGH, PRUNED).to(torch.int8)
    return torch.empty_like(tiers).scatter_(-1, order, tiers)


@functools.lru_cache(maxsize=64)
def _column(numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Cached int64 `[1, groups, 1]`: no plan copies these numbers to the device again."""
    return upload(numbers, device, torch.int64).view(1, -1, 1)


def _ranks_after(values: torch.Tensor, first: torch.Tensor | None) -> torch.Tensor:
    """Rank along the last dim: members of bool `first` (None: no members), then the rest, each best value first, equals
    by position."""
    order = values.sort(dim=-1, descending=True, stable=True).indices
    if first is not None:
        first_first = (~first.gather(-1, order)).to(torch.int8).sort(dim=-1, stable=True).indices
        order = order.gather(-1, first_first)
    place = torch.arange(values.shape[-1], device=values.device).expand(order.shape)
    return torch.empty_like(order).scatter_(-1, order, place)


def _tier_pages(tiers: torch.Tensor, high_tokens: int, low_tokens: int) -> torch.Tensor:
    """Pages `[n, L, H]` that tiers `[n, L, H, P]` need."""
    high, low = (tiers == HIGH).sum(-1), (tiers == LOW).sum(-1)
    return (high + high_tokens - 1) // high_tokens + (low + low_tokens - 1) // low_tokens


def threshold(
    mean_attention_scores: torch.Tensor,
    divisor: torch.Tensor,
    alpha_high: float,
    alpha_low: float,
    ceiling: torch.Tensor,
    high_tokens: int,
    low_tokens: int,
    max_pages: torch.Tensor | None = None,
) -> torch.Tensor:
    """Tiers int8 `[n, L, H, P]` by LeanKV's thresholds (section 4 and Algorithm 1), rounded to whole pages.

    `mean_attention_scores` fp32 `[n, L, H, P]`: mean attention scores. `divisor` fp32 `[n, P]`: token position i in the
    prompt phase, sequence length N during decode. A token is pruned if its mean attention score < alpha_low / divisor,
    else high if >= alpha_high / divisor, else low, and never above `ceiling` int8 `[n, L, H, P]`: tiers only go down.
    With alpha_high 0 every token that is not pruned is high.

    The free slots of the last pages are then filled, which costs no bytes: the last high page with the best tokens
    below that are still stored high (low ones first, then pruned ones), the last low page with the best pruned tokens
    that are still stored. The best tokens are those closest to their threshold, score * divisor, ties by position.
    `high_tokens`, `low_tokens`: tokens per page of each tier.

    A head that then needs more than `max_pages` `[n, L, H]` (only if a low page holds fewer tokens than a high one)
    stays at its ceiling, or keeps its best high tokens if that does not fit either.
    """
    by_token = divisor[:, None, None, :]
    tiers = torch.where(mean_attention_scores >= alpha_high / by_token, HIGH, LOW)
    tiers = torch.where(mean_attention_scores >= alpha_low / by_token, tiers, PRUNED).to(torch.int8)
    tiers = torch.minimum(tiers, ceiling)
    closeness = mean_attention_scores * by_token
    for tier, page_tokens in ((HIGH, high_tokens), (LOW, low_tokens)):
        room = (-(tiers == tier).sum(-1, keepdim=True)) % page_tokens
        candidate = (tiers < tier) & (ceiling >= tier)
        fill = candidate & (_ranks_after(closeness, candidate) < room)
        tiers = torch.where(fill, tier, tiers).to(torch.int8)
    if max_pages is not None:
        limit = max_pages.to(torch.int64)
        tiers = torch.where((_tier_pages(tiers, high_tokens, low_tokens) > limit).unsqueeze(-1), ceiling, tiers)
        best = (ceiling == HIGH) & (_ranks_after(closeness, ceiling == HIGH) < (limit * high_tokens).unsqueeze(-1))
        over = (_tier_pages(tiers, high_tokens, low_tokens) > limit).unsqueeze(-1)
        tiers = torch.where(over, best.to(torch.int8) * HIGH, tiers)
    return tiers
