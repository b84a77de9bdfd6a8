"""`prune`: a scorer ranks tokens, a share allocates pages to layers and heads, a format stores what is kept."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from kvc_kernels import ops
from kvc_kernels.formats import BF16, FORMATS
from kvc_kernels.layout import BlockFormat, PoolLayout
from kvc_kernels.ops import HIGH, LOW, PRUNED
from sglang_kvc.errors import flag

from ..calibration.tensors import Calibration, check_shapes, load
from .allocation import SHARES, Global, Share
from .base import BLOCK, SEQUENCE, Evidence, Policy, with_evidence
from .budget import Budget, compression, token_bytes
from .parse import parse_part
from .scorers import SCORERS, KeyDiff, Scorer

LEAST_HELD_KEY_BITS = 4  # minimum bits of the keys of an incomplete prompt
MIN_PLANNED_SHARE = 0.75  # of their budget that planned blocks of an answer keep: dropped tokens cannot come back


def parse_scorer(text: str) -> Scorer:
    """The scorer that `--kvc-scorer` names."""
    return parse_part(text, SCORERS, flag("scorer"))


def parse_share(text: str) -> Share:
    """The share that `--kvc-share` names."""
    return parse_part(text, SHARES, flag("share"))


@dataclass(frozen=True)
class Prune(Policy):
    """Keep the fraction `keep` of a block's pages, or as many as `budget` pays for, in format `high`.

    The number of pages is the same for every block and known before the plan (a quota). With `low` nothing is
    dropped: tokens that win no high page are stored low (MiKV). The page count then depends on how tokens fill pages,
    and comes back from the device.

    With `lag`, blocks of an answer are first packed with all their tokens and later planned together: heads, layers and
    blocks compete for the pages of the whole answer (KV-Compress, equation 20), and a head may keep nothing of a block.

    Otherwise every head keeps at least one page, and the first `sinks` tokens of a sequence always stay, in the high
    format. `scorer`, `share` and `budget` may also be given as text, like `snapkv:window=64`.
    """

    name: ClassVar[str] = "prune"
    high: str = "k4v4"
    low: str | None = None
    keep: float = 0.5
    budget: Budget | None = None
    scorer: Scorer = field(default=KeyDiff())
    share: Share = field(default=Global())
    sinks: int = 4
    lag: int = 0
    calibration: str | None = None

    def __post_init__(self) -> None:
        for name, parse in (("scorer", parse_scorer), ("share", parse_share), ("budget", Budget.parse)):
            if isinstance(text := getattr(self, name), str):
                object.__setattr__(self, name, parse(text))

    @property
    def needs(self) -> tuple[str, ...]:
        return (*self.scorer.needs, *self.share.needs)

    @property
    def scope(self) -> str:  # type: ignore[override]
        return BLOCK if self.scorer.sampling is None else SEQUENCE

    @property
    def score_sampling(self) -> ops.ScoreSampling | None:
        return with_evidence(self.scorer.sampling, self.lag)

    @property
    def unplanned_format(self) -> int:
        return 2 if self.lag or self.scope == SEQUENCE else 0

    @property
    def answer_format(self) -> int:
        return 3 if self.lag else 0

    @property
    def moves(self) -> tuple[tuple[int, int], ...]:
        if not self.unplanned_format:
            return ()
        return ((2, 1), (2, 3)) if self.lag else ((2, 1),)

    def formats(self) -> list[str]:
        return [self.high] + ([self.low] if self.low else [])

    def check(self, layout: PoolLayout) -> None:
        self.high_pages(layout)
        if self.needs:
            check_shapes(self.calibration, self.needs, layout)

    # ---- how many pages

    def floor_pages(self, layout: PoolLayout) -> int:
        """Pages that every head keeps: enough for the sinks."""
        fmt = FORMATS[self.high]
        return min(max(1, layout.pages_for(fmt, self.sinks)), layout.pages_for(fmt, layout.block_tokens))

    def high_pages(self, layout: PoolLayout) -> int:
        """Pages of format `high` per block. ValueError, in one sentence, when the budget pays for too few."""
        fmt, heads = FORMATS[self.high], layout.layers * layout.heads
        least, most = heads * self.floor_pages(layout), layout.block_pages(fmt)
        if self.budget is None:
            return min(most, max(least, round(self.keep * most)))
        allowed = self.budget.pages(layout)
        for pages in range(most, least - 1, -1):
            if self.block_pages(layout, pages) <= allowed:
                return pages
        if self.lag and allowed > 0:
            return least  # for a prompt; answers meet the budget
        fewest = self.block_pages(layout, least)
        best = f"{math.floor(100 * compression(layout, fewest)) / 100}x"
        if self.budget.ratio is None:
            best = f"{math.ceil(token_bytes(layout, fewest))}"
        why = "each head keeps at least a page" if self.low is None else "no token is dropped"
        raise ValueError(
            f"{flag('budget')} {self.budget} cannot be met with {'+'.join(self.formats())}, because {why}, which "
            f"limits it to {best}; choose {best}, a format of fewer bits, or a smaller --kvc-page-bytes"
        )

    def block_pages(self, layout: PoolLayout, high_pages: int) -> int:
        """Maximum pages of a block with `high_pages` high pages."""
        if self.low is None:
            return high_pages
        high, low = (layout.page(FORMATS[f]).tokens for f in (self.high, self.low))
        heads, p = layout.layers * layout.heads, layout.block_tokens
        floor, per_head = self.floor_pages(layout), -(-p // high)
        # Low pages of a head with k high pages. Over all divisions of the high pages, their sum is at most the concave
        # envelope of this function, at the mean number of high pages.
        low_pages = [-(-max(0, p - k * high) // low) for k in range(per_head + 1)]
        most = max(
            (
                low_pages[a] * heads + (low_pages[b] - low_pages[a]) * (high_pages - heads * a) // max(1, b - a)
                for a in range(floor, per_head + 1)
                for b in range(a, per_head + 1)
                if heads * a <= high_pages <= heads * b
            ),
            default=0,
        )
        return min(high_pages + most, heads * layout.head_pages_bf16)

    def block_formats(self, layout: PoolLayout) -> tuple[BlockFormat, ...]:
        uncompressed, high = BlockFormat(BF16, pages=layout.block_pages_bf16), FORMATS[self.high]
        low = FORMATS[self.low] if self.low else None
        pages = self.block_pages(layout, self.high_pages(layout))
        full = layout.block_pages(high)
        formats = [uncompressed, BlockFormat(high, low, pages=pages, exact=low is None)]
        if self.unplanned_format:
            # Later chunks of a prompt read these keys. With a lag, blocks of an answer compete as they were packed.
            if high.key_bits < LEAST_HELD_KEY_BITS and not self.lag:
                held = FORMATS["k4v4"]
                formats.append(BlockFormat(held, pages=layout.block_pages(held)))
            else:
                formats.append(BlockFormat(high, low, pages=full))
        if self.answer_format:
            formats.append(BlockFormat(high, pages=full, exact=False))
        return tuple(formats)

    def answer_pages(self, layout: PoolLayout, planned: int, unplanned: int) -> int:
        """The budget of all these blocks less the pages of the unplanned ones, but at least `MIN_PLANNED_SHARE` of the
        planned blocks' budget."""
        full = layout.block_pages(FORMATS[self.high])
        budget = self.keep * full if self.budget is None else min(full, self.budget.pages(layout))
        return int(max(budget * (planned + unplanned) - full * unplanned, MIN_PLANNED_SHARE * budget * planned))

    # ---- which tokens

    def _protected(self, scores: torch.Tensor, evidence: Evidence) -> torch.Tensor:
        """`scores` with infinity for the sinks."""
        return scores.masked_fill((evidence.positions() < self.sinks)[:, None, None, :], torch.inf)

    def statistics(self, evidence: Evidence) -> Calibration | None:
        """Tensors of the calibration file on the evidence's device; None if none are needed."""
        return load(self.calibration, evidence.blocks.device) if self.needs else None

    def plan(self, evidence: Evidence, block_format: BlockFormat) -> torch.Tensor:
        layout, stats = evidence.layout, self.statistics(evidence)
        scores = self._protected(self.scorer.score(replace(evidence, calibration=stats)), evidence)
        tiers = self.share.plan(
            scores, self.high_pages(layout), layout.page(block_format.high).tokens, self.floor_pages(layout), stats
        )
        return tiers if block_format.low is None else tiers.clamp(min=LOW)

    def compete(self, evidence: Evidence, block_format: BlockFormat, pages: int, answers: int = 1) -> torch.Tensor:
        """The heads of an answer's blocks are treated as heads of one block, so that a share divides the pages as in a
        block. A score that grows with the number of queries is divided by that number."""
        layout, stats = evidence.layout, self.statistics(evidence)
        known = replace(evidence, calibration=stats)
        scores = self.scorer.score(known)
        if self.scorer.sums:
            scores = scores / known.query_counts()
        scores = self._protected(scores, known)  # sinks of a prompt that is shorter than a block
        stored = known.tiers() == HIGH
        del known  # frees the places of all tokens before the sort
        by_answer = scores.masked_fill(~stored, -torch.inf).unflatten(0, (answers, -1))
        rows = by_answer.transpose(1, 2)  # [answers, L, blocks, H, P]
        tiers = self.share.plan(rows.flatten(2, 3), pages, layout.page(block_format.high).tokens, 0, stats)
        return torch.where(stored, tiers.view(rows.shape).transpose(1, 2).flatten(0, 1), PRUNED)
