"""LeanKV (DiffKV, arXiv 2412.03131, section 4): tokens high, low or pruned by their attention scores."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from kvc_kernels import ops
from kvc_kernels.formats import BF16, FORMATS
from kvc_kernels.layout import BlockFormat, PoolLayout

from ..base import SEQUENCE, Evidence, Policy, with_evidence


@dataclass(frozen=True)
class LeanKV(Policy):
    """A token's score is its mean attention probability from later queries, the maximum over a KV head's query heads.

    In a prompt, token i is pruned if its score is below alpha_low / i, else stored high if it is at least
    alpha_high / i, and low otherwise (1/i is what uniform attention gives). With alpha_high 0 every token that is not
    pruned is high. While generating (Algorithm 1), a block is planned against alpha / N at sequence length N, when it
    leaves the window and each time the sequence has doubled since (`places_to_replan`). Tokens only move down: high,
    low, pruned. The paper moves one token per step; here the unit is a block.

    With `lag`, all tokens of a block that leaves the window are stored high, as the paper does with its recent window.
    The block is planned when `lag` tokens follow it.
    """

    name: ClassVar[str] = "leankv"
    scope: ClassVar[str] = SEQUENCE
    high: str = "k8v4"
    low: str = "k4v2"
    alpha_high: float = 1.0
    alpha_low: float = 0.02
    observe: ops.ScoreSampling = field(default=ops.ScoreSampling())
    lag: int = 0
    calibration: str | None = None  # decides formats and defaults at start; no plan reads it

    @property
    def score_sampling(self) -> ops.ScoreSampling | None:
        return with_evidence(self.observe, self.lag)

    @property
    def unplanned_format(self) -> int:
        return 2

    @property
    def moves(self) -> tuple[tuple[int, int], ...]:
        return ((1, 1), (self.unplanned_format, 1))

    def formats(self) -> list[str]:
        return [self.high, self.low]

    def block_formats(self, layout: PoolLayout) -> tuple[BlockFormat, ...]:
        high, low = FORMATS[self.high], FORMATS[self.low]
        # Two tiers of one head take at most all tokens high and one partly filled low page.
        per_head = layout.pages_for(high, layout.block_tokens) + 1
        pages = layout.layers * layout.heads * min(per_head, layout.head_pages_bf16)
        # Both packed formats have two tiers, so that one decode kernel serves them. An unplanned block uses one tier.
        unplanned = BlockFormat(high, low, pages=layout.block_pages(high))
        uncompressed = BlockFormat(BF16, pages=layout.block_pages_bf16)
        return uncompressed, BlockFormat(high, low, pages=pages, exact=False), unplanned

    def assumed_block_ratio(self, layout: PoolLayout) -> float:
        # As if every token were low, times a factor for pruned tokens. That suffices for all rows of
        # docs/quality-research.md, with thresholds up to 0.1, because kept tokens are partly high.
        return layout.block_pages_bf16 / layout.block_pages(FORMATS[self.low]) * (1 + 3 * self.alpha_low)

    def plan(self, evidence: Evidence, block_format: BlockFormat) -> torch.Tensor:
        return evidence.thresholds(ops.Thresholds(self.alpha_high, self.alpha_low), block_format)
