"""`quantize`: every token kept, in one packed format. A block depends on its own rows alone, so sharing it is safe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvc_kernels.formats import BF16, FORMATS, Format
from kvc_kernels.layout import BlockFormat, PoolLayout
from sglang_kvc.errors import flag

from .base import Evidence, Policy
from .ladder import next_lower, steps


@dataclass(frozen=True)
class Quantize(Policy):
    """`high` is the packed format; "bf16" compresses nothing (the uncompressed baseline: same layout, exact values).

    Prefill attends to earlier blocks fake-quantized, and with a window of 0 so does decode. A block's content is then a
    function of the tokens up to its end, however many came from the prefix cache.
    """

    name: ClassVar[str] = "quantize"
    default_window: ClassVar[int] = 0
    keeps_all: ClassVar[bool] = True
    high: str = "k4v4"
    levels: tuple[str, ...] = ()  # formats that single requests may ask for instead
    calibration: str | None = None  # decides formats and defaults at start; no plan reads it
    floor: str | None = None  # lowest format that cold blocks move to; None: they keep `high`

    @property
    def _own(self) -> tuple[str, ...]:
        """`high` and the formats below it, if it packs."""
        return (self.high, *steps(self.high, self.floor)) if FORMATS[self.high].packed else ()

    @property
    def _named(self) -> tuple[str, ...]:
        """Formats that a request may name. With a floor, a named `high` is a separate block format, which never moves
        down."""
        return (*self.levels, *([self.high] if self.floor else []))

    def formats(self) -> list[str]:
        return [*self._own, *self._named]

    def block_formats(self, layout: PoolLayout) -> tuple[BlockFormat, ...]:
        """Uncompressed, the server's format and those below it, and the formats that requests name. Equal formats under
        two ids differ in whether cold blocks move down."""
        packed = (FORMATS[name] for name in self.formats())
        return (
            BlockFormat(BF16, pages=layout.block_pages_bf16),
            *(BlockFormat(f, pages=layout.block_pages(f)) for f in packed)
        )

    def check(self, layout: PoolLayout) -> None:
        if self.ladder and not any(next_lower(self.block_formats(layout), self.ladder)):
            pages = layout.pages_for(FORMATS[self.high], layout.block_tokens)
            raise ValueError(
                f"{flag('floor')} {self.floor} saves nothing, because a head of a block takes {pages} pages of "
                f"{layout.page_bytes} bytes in {self.high} and in {self.floor}; drop {flag('page_bytes')}, or choose a "
                f"lower floor or a larger {flag('block_size')}"
            )

    @property
    def ladder(self) -> tuple[int, ...]:
        return tuple(range(1, 1 + len(self._own))) if self.floor else ()

    def format_id_of(self, level: str | None) -> int:
        if level is None:
            return 1 if self._own else 0
        return 1 + len(self._own) + self._named.index(level) if level in self._named else 0

    @property
    def default_level(self) -> str | None:
        return None if self.floor else self.high

    def fake_quant_format(self, format_id: int = 1) -> Format | None:
        formats = self.formats()
        return FORMATS[formats[format_id - 1]] if 0 < format_id <= len(formats) else None

    def plan(self, evidence: Evidence, block_format: BlockFormat) -> None:
        return None
