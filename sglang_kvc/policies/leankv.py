"""LeanKV (DiffKV, arXiv 2412.03131, section 4): high, low or pruned by thresholds on received attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvc_kernels import ops
from kvc_kernels.layout import BF16, FORMATS, PoolLayout, Rung

from .base import SEQUENCE, Evidence, Policy


@dataclass(frozen=True)
class LeanKV(Policy):
    """Significance of token i: the mean attention that it receives from later tokens, max over a KV head's query heads.

    Prompt phase: high if it is at least alpha_high / i, low if at least alpha_low / i, else pruned (1/i is what uniform
    attention gives). Generation phase (Algorithm 1): the same against alpha / N with the sequence length N, applied to
    a block when it leaves the window and again whenever the sequence has doubled since
    (`Sequence.blocks_to_replan`); tokens only go down: high -> low -> pruned. The paper moves one token a step; here
    the unit is a block.
    """

    name: ClassVar[str] = "leankv"
    scope: ClassVar[str] = SEQUENCE
    replans: ClassVar[bool] = True
    high: str = "k8v4"
    low: str = "k4v2"
    alpha_high: float = 1.0
    alpha_low: float = 0.02
    observe: str | int = "all"
    calibration: str | None = None  # judges formats and sets defaults; no plan reads it

    @property
    def collects(self) -> ops.Observe:
        kind, _, stride = str(self.observe).partition("/")
        return ops.Observe(None if kind == "all" else int(kind), stride=int(stride or 1))

    def formats(self) -> list[str]:
        return [self.high, self.low]

    def ladder(self, layout: PoolLayout) -> tuple[Rung, ...]:
        high, low = FORMATS[self.high], FORMATS[self.low]
        # Two tiers of one head never take more than all tokens high and one part-filled low page.
        per_head = layout.pages_for(high, layout.block_tokens) + 1
        pages = layout.layers * layout.heads * min(per_head, layout.head_pages_bf16)
        return (Rung(BF16, pages=layout.block_pages_bf16), Rung(high, low, pages=pages, exact=False))

    def plan(self, evidence: Evidence, rung: Rung) -> torch.Tensor:
        return evidence.thresholds(ops.Thresholds(self.alpha_high, self.alpha_low), rung)
