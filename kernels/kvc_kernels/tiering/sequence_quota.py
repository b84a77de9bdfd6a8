"""Competition of all pages of a sequence (KV-Compress, arXiv 2410.00161, section 4.2, equations 13 to 18)."""

from __future__ import annotations

import torch

from .quota import _ranks_after


def ranked_tokens(
    scores: torch.Tensor, most: int, page_tokens: int, first: int, last: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best `most` tokens of each head and the worth of their pages: int32 `[H, most]`, fp32 `[H, most / T]`.

    `scores` fp32 `[H, S]`. Tokens are in the order of their scores, ties by position; the `first` and `last` tokens
    come before all others. Page j is the tokens jT .. (j+1)T - 1 of that order and is worth its best one, with
    T = `page_tokens`.
    """
    scores = scores.clone()
    scores[:, :first].fill_(torch.inf)
    scores[:, scores.shape[1] - last :].fill_(torch.inf)
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    return order[:, :most].int(), ranked[:, :most:page_tokens].contiguous()


def sequence_quota(worth: torch.Tensor, pages: int, floor: int) -> torch.Tensor:
    """Pages that each head keeps, int64 `[heads]`, `pages` in total.

    `worth` fp32 `[heads, most]`: worth of each head's pages, not rising along the last dim; `most` is the maximum
    number of pages of a head. All heads of all layers compete: each gets its first `floor` pages, and the rest go to
    the pages worth most, ties by (head, page). ValueError unless heads * floor <= pages <= heads * most.
    """
    heads, most = worth.shape
    if not heads * floor <= pages <= heads * most:
        raise ValueError(f"{pages} pages are not within {heads * floor}..{heads * most} for {heads} heads")
    guaranteed = (torch.arange(most, device=worth.device) < floor).expand(worth.shape)
    won = _ranks_after(worth.reshape(1, -1), guaranteed.reshape(1, -1)) < pages
    return won.view(heads, most).sum(-1)
