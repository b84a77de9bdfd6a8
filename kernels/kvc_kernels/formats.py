"""Storage formats of a page: bits per key element and per value element."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """Bits per key element and per value element of a page. 16 bits: the model dtype."""

    name: str
    key_bits: int
    value_bits: int

    @property
    def packed(self) -> bool:
        return self.key_bits < 16


FORMATS = {
    f.name: f
    for f in (
        Format("bf16", 16, 16),
        Format("k8v8", 8, 8),
        Format("k8v4", 8, 4),
        Format("k4v8", 4, 8),
        Format("k4v4", 4, 4),
        Format("k4v2", 4, 2),
        Format("k2v2", 2, 2),
    )
}
BF16 = FORMATS["bf16"]
