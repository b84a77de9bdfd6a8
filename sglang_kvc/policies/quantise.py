"""Quantise-only: every token kept, all in one packed format. Needs no score, so it is pure and safe to share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvc_kernels.layout import BF16, FORMATS, Format, PoolLayout, Rung
from sglang_kvc.options.request_quality import names

from .base import Evidence, Policy


@dataclass(frozen=True)
class Quantise(Policy):
    """`high` is the packed format; "bf16" compresses nothing (the honest base: same memory layout, exact values).

    A prompt's queries see the blocks before their own fake-quantized, and with no window a decode step does so too.
    What a block holds is then a function of the tokens up to its end, whichever of them were cached.
    """

    name: ClassVar[str] = "quantise"
    default_window: ClassVar[int] = 0
    keeps_all: ClassVar[bool] = True
    high: str = "k4v4"
    levels: str | None = None  # formats that single requests may ask for instead
    calibration: str | None = None  # judges formats and sets defaults; no plan reads it

    def formats(self) -> list[str]:
        return [name for name in (self.high, *names(self.levels)) if FORMATS[name].packed]

    def ladder(self, layout: PoolLayout) -> tuple[Rung, ...]:
        """Uncompressed, the server's format, and those of the levels: a block goes to one of them and stays there."""
        packed = (FORMATS[name] for name in self.formats())
        return (Rung(BF16, pages=layout.block_pages_bf16), *(Rung(f, pages=layout.block_pages(f)) for f in packed))

    def rung_of(self, level: str | None) -> int:
        found = self.high if level is None else level
        return 1 + self.formats().index(found) if found in self.formats() else 0

    @property
    def own_level(self) -> str:
        return self.high

    def stored_as(self, rung: int = 1) -> Format | None:
        return FORMATS[self.formats()[rung - 1]] if 0 < rung <= len(self.formats()) else None

    def plan(self, evidence: Evidence, rung: Rung) -> None:
        return None
