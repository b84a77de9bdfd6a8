"""LeanKV's tier plan of whole blocks, from the stored attention scores, the present tiers and the pages in use."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..layout import BlockFormat
from ..pages.dense import block_tiers
from ..pages.reference import block_head_pages
from ..scores.reference import ScoreSampling, mean_attention_scores
from ..store import PageStore
from .quota import threshold


class Thresholds(NamedTuple):
    """Factors of the mean attention: pruned below `low`, otherwise high from `high` on; see `quota.threshold`."""

    high: float
    low: float


def plan_thresholds(
    store: PageStore,
    blocks: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    prompts: torch.Tensor,
    alpha: Thresholds,
    sampling: ScoreSampling,
    *,
    from_format: int,
    to: BlockFormat,
) -> torch.Tensor:
    """Tiers int8 `[n, L, H, P]` of `blocks[n]`, all at `from_format`, for the storage format `to`.

    `starts[n]`: position of each block's first token. `lengths[n]`: length N of the sequence, or 0 to measure each
    token against its position. `prompts[n]`: tokens of the prompt, see `queries_of_tokens`. Reads nothing on the host.
    """
    layout = store.layout
    positions = (starts[:, None] + torch.arange(layout.block_tokens, device=starts.device)).float()
    n_tokens = lengths[:, None].float()
    return threshold(
        mean_attention_scores(store, blocks, starts, prompts, sampling, from_format),
        torch.where(n_tokens > 0, n_tokens, positions + 1),
        alpha.high,
        alpha.low,
        block_tiers(store, blocks, from_format),
        layout.page(to.high).tokens,
        layout.page(to.low).tokens,
        block_head_pages(store, blocks),
    )
