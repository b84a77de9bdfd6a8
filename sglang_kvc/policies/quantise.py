"""`quantise`: every token kept, in one packed format. A block depends on its own rows alone, so sharing it is safe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvc_kernels.layout import BF16, FORMATS, BlockFormat, Format, PoolLayout

from .base import Evidence, Policy


@dataclass(frozen=True)
class Quantise(Policy):
    """`high` is the packed format; "bf16" compresses nothing (the uncompressed baseline: same layout, exact values).

    Prefill attends to earlier blocks fake-quantized, and with a window of 0 so does decode. A block's content is then a
    function of the tokens up to its end, whichever of them came from the prefix cache.
    """

    name: ClassVar[str] = "quantise"
    default_window: ClassVar[int] = 0
    keeps_all: ClassVar[bool] = True
    high: str = "k4v4"
    levels: tuple[str, ...] = ()  # formats that single requests may ask for instead
    calibration: str | None = None  # decides formats and defaults at start; no plan reads it

    def formats(self) -> list[str]:
        return [name for name in (self.high, *self.levels) if FORMATS[name].packed]

    def block_formats(self, layout: PoolLayout) -> tuple[BlockFormat, ...]:
        """Uncompressed, the server's format, and the formats of `levels`. A packed block keeps its format."""
        packed = (FORMATS[name] for name in self.formats())
        return (
            BlockFormat(BF16, pages=layout.block_pages_bf16),
            *(BlockFormat(f, pages=layout.block_pages(f)) for f in packed)
        )

    def format_id_of(self, level: str | None) -> int:
        name, formats = level or self.high, self.formats()
        return 1 + formats.index(name) if name in formats else 0

    @property
    def default_level(self) -> str:
        return self.high

    def fake_quant_format(self, format_id: int = 1) -> Format | None:
        formats = self.formats()
        return FORMATS[formats[format_id - 1]] if 0 < format_id <= len(formats) else None

    def plan(self, evidence: Evidence, block_format: BlockFormat) -> None:
        return None
