"""The composed policy: a scorer says what matters, a share who keeps how many pages, a format how they are stored."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from kvc_kernels import ops
from kvc_kernels.layout import BF16, FORMATS, PoolLayout, Rung
from kvc_kernels.pages.tiers import LOW

from ..calibration import tensors as calibrations
from .allocation import SHARES, Share
from .base import BLOCK, SEQUENCE, Evidence, Policy
from .budget import Budget, smaller, token_bytes
from .parse import build
from .scorers import SCORERS, Scorer


@dataclass(frozen=True)
class Prune(Policy):
    """Keep the fraction `keep` of a block's pages, or as many as `budget` pays for, in format `high`.

    The number of pages is the same for every block and known before the plan (a quota rung). With `low` nothing is
    dropped: what does not win a high page is stored low (MiKV's ladder), and the count, which then depends on how
    tokens fill pages, comes back from the device.

    Protected: every head keeps a page, and of a sequence's first block the first `sinks` tokens stay, high, whatever
    their score. `scorer` and `share` may carry settings: `snapkv:window=64`.
    """

    name: ClassVar[str] = "prune"
    high: str = "k4v4"
    low: str | None = None
    keep: float = 0.5
    budget: str | None = None
    scorer: str = "keydiff"
    share: str = "global"
    sinks: int = 4
    calibration: str | None = None

    @functools.cached_property
    def scorer_part(self) -> Scorer:
        return build(self.scorer, SCORERS, "--kvc-scorer")

    @functools.cached_property
    def share_part(self) -> Share:
        return build(self.share, SHARES, "--kvc-share")

    @property
    def needs(self) -> tuple[str, ...]:
        """Tensors that the calibration file must hold."""
        return (*self.scorer_part.needs, *self.share_part.needs)

    @property
    def scope(self) -> str:  # type: ignore[override]
        return BLOCK if self.scorer_part.observe is None else SEQUENCE

    @property
    def collects(self) -> ops.Observe | None:
        return self.scorer_part.observe

    def formats(self) -> list[str]:
        return [self.high] + ([self.low] if self.low else [])

    def check(self, layout: PoolLayout) -> None:
        self.high_pages(layout)
        if self.needs:
            calibrations.check_shapes(self.calibration, self.needs, layout)

    # ---- how many pages

    def floor_pages(self, layout: PoolLayout) -> int:
        """Pages that every head keeps: enough for the sinks, which come first wherever they are."""
        fmt = FORMATS[self.high]
        return min(max(1, layout.pages_for(fmt, self.sinks)), layout.pages_for(fmt, layout.block_tokens))

    def high_pages(self, layout: PoolLayout) -> int:
        """Pages of format `high` in a block. ValueError, in one sentence, when the budget pays for too few."""
        fmt, heads = FORMATS[self.high], layout.layers * layout.heads
        least, most = heads * self.floor_pages(layout), layout.block_pages(fmt)
        if self.budget is None:
            return min(most, max(least, round(self.keep * most)))
        budget = Budget.parse(self.budget)
        allowed = budget.pages(layout)
        for pages in range(most, least - 1, -1):
            if self.block_pages(layout, pages) <= allowed:
                return pages
        fewest = self.block_pages(layout, least)
        best = f"{math.floor(100 * smaller(layout, fewest)) / 100}x"
        if budget.ratio is None:
            best = f"{math.ceil(token_bytes(layout, fewest))}"
        why = "each head keeps at least a page" if self.low is None else "no token is dropped"
        raise ValueError(
            f"--kvc-budget {self.budget} cannot be met with {'+'.join(self.formats())}, because {why}, which makes "
            f"{best}; choose that, a format of fewer bits, or a smaller --kvc-page-bytes"
        )

    def block_pages(self, layout: PoolLayout, high_pages: int) -> int:
        """Most pages that a block with this many high ones has."""
        if self.low is None:
            return high_pages
        high, low = (layout.page(FORMATS[f]).tokens for f in (self.high, self.low))
        heads, p = layout.layers * layout.heads, layout.block_tokens
        per_head = -(-p // high)
        # Where all of a head's pages are high the last may be part-filled: those heads leave more tokens to the others.
        rest = max(0, heads * p - high_pages * high + high_pages // per_head * (per_head * high - p))
        low_pages = (rest + heads * (low - 1)) // low if rest else 0
        return min(high_pages + low_pages, heads * layout.head_pages_bf16)

    def ladder(self, layout: PoolLayout) -> tuple[Rung, ...]:
        bottom, high = Rung(BF16, pages=layout.block_pages_bf16), FORMATS[self.high]
        low = FORMATS[self.low] if self.low else None
        pages = self.block_pages(layout, self.high_pages(layout))
        return (bottom, Rung(high, low, pages=pages, exact=low is None))

    # ---- which

    def plan(self, evidence: Evidence, rung: Rung) -> torch.Tensor:
        layout = evidence.layout
        stats = calibrations.load(self.calibration, evidence.blocks.device) if self.needs else None
        scores = self.scorer_part.score(replace(evidence, calibration=stats))
        protected = (evidence.positions() < self.sinks)[:, None, None, :]
        scores = scores.masked_fill(protected, torch.inf)
        tiers = self.share_part.plan(
            scores, self.high_pages(layout), layout.page(rung.high).tokens, self.floor_pages(layout), stats
        )
        return tiers if rung.low is None else tiers.clamp(min=LOW)
