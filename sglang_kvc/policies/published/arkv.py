"""ARKV (arXiv 2603.08727): the best tokens of a block are stored high, the next ones low, and the rest are dropped."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from kvc_kernels import ops
from kvc_kernels.formats import FORMATS
from kvc_kernels.layout import BlockFormat, PoolLayout
from kvc_kernels.ops import HIGH, LOW

from ..allocation import Cake, Share
from ..base import Evidence
from ..prune import Prune
from ..scorers.base import Scorer
from .h2o import H2O


@dataclass(frozen=True)
class Arkv(Prune):
    """The share `keep` of a block's pages is high, `LOW_SHARE` of its tokens low, in the order of heavy-hitter scores.
    Layers share the high pages by their attention's entropy and variance; all heads compete for the low ones.

    Assumed: the high state is a packed format, k8v8, and not the original 16 bits, because uncompressed pages belong to
    open blocks. A layer's part of the high pages is CAKE's preference; the paper's OQ score also has the kurtosis, and
    decides the low part, too. States are decided once, when a block leaves the window, and not at every step.
    """

    LOW_SHARE: ClassVar[float] = 0.25

    name: ClassVar[str] = "arkv"
    preset: ClassVar[bool] = True
    high: str = "k8v8"
    low: str | None = "k4v2"
    keep: float = 0.25
    scorer: Scorer = field(default=H2O())
    share: Share = field(default=Cake())

    def low_pages(self, layout: PoolLayout) -> int:
        """Low pages of a block."""
        return round(self.LOW_SHARE * layout.block_pages(FORMATS[self.low])) if self.low else 0

    def block_pages(self, layout: PoolLayout, high_pages: int) -> int:
        return min(high_pages + self.low_pages(layout), layout.block_pages_bf16)

    def plan(self, evidence: Evidence, block_format: BlockFormat) -> torch.Tensor:
        tiers = super().plan(evidence, block_format)
        if block_format.low is None:
            return tiers
        scores = self.scorer.score(replace(evidence, calibration=self.statistics(evidence)))
        rest = scores.masked_fill(tiers == HIGH, -torch.inf)
        page = evidence.layout.page(block_format.low)
        low = ops.quota(rest, self.low_pages(evidence.layout), page.tokens, 0)
        return torch.where((tiers == LOW) & (low == 0), 0, tiers).to(torch.int8)
