"""Quantise-only: every token kept, all in one packed format. Needs no score, so it is pure and safe to share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvc_kernels import ops
from kvc_kernels.layout import BF16, FORMATS, Format, PoolLayout, Rung

from .base import Evidence, Policy


@dataclass(frozen=True)
class Quantise(Policy):
    """`high` is the packed format; "bf16" compresses nothing (the honest base: same memory layout, exact values).

    A prompt's queries see the blocks before their own as they will be stored, and with no window a decode step does so
    too: what a block holds is then a function of the tokens up to its end, whichever of them were cached.
    """

    name: ClassVar[str] = "quantise"
    default_window: ClassVar[int] = 0
    high: str = "k4v4"
    calibration: str | None = None  # judges formats and sets defaults; no plan reads it

    def formats(self) -> list[str]:
        return [self.high]

    def ladder(self, layout: PoolLayout) -> tuple[Rung, ...]:
        bottom = Rung(BF16, pages=layout.block_pages_bf16)
        fmt = FORMATS[self.high]
        return (bottom, Rung(fmt, pages=layout.block_pages(fmt))) if fmt.packed else (bottom,)

    def stored_as(self) -> Format | None:
        fmt = FORMATS[self.high]
        return fmt if fmt.packed else None

    def plan(self, evidence: Evidence, rung: Rung) -> torch.Tensor:
        # Made where it is used: a copy from the host would wait for all that the stream has queued.
        return ops.keep_all(len(evidence.blocks), evidence.layout, evidence.blocks.device)
