"""The one knob: how small packed blocks shall be, as `4x` (than bf16 K and V) or in bytes per token."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvc_kernels.layout import PoolLayout

RING_ENTRY_BYTES = 4  # a page's place in the ring of free pages


@dataclass(frozen=True)
class Budget:
    """Exactly one of `ratio` (times smaller than K and V in 16 bits) and `token_bytes` (all layers of a rank)."""

    ratio: float | None = None
    token_bytes: float | None = None

    @classmethod
    def parse(cls, text: str) -> Budget:
        """'4x', '3.5x' or '1200'. ValueError for anything else, and for sizes that are none."""
        m = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(x?)", text.strip().lower())
        if not m or float(m[1]) <= 0:
            raise ValueError(f"{text!r} is neither like 4x nor a number of bytes")
        return cls(ratio=float(m[1])) if m[2] else cls(token_bytes=float(m[1]))

    def block_bytes(self, layout: PoolLayout) -> float:
        """Bytes that a packed block may have, everything counted."""
        if self.token_bytes is not None:
            return self.token_bytes * layout.block_tokens
        return 4 * layout.layers * layout.heads * layout.head_dim * layout.block_tokens / self.ratio

    def pages(self, layout: PoolLayout) -> int:
        """Pages that a packed block may have: its tables, counts and headers are paid first. Below 0 if not even they
        fit."""
        return int((self.block_bytes(layout) - layout.block_meta_bytes) // (layout.page_bytes + RING_ENTRY_BYTES))


def token_bytes(layout: PoolLayout, pages: int) -> float:
    """Bytes per token of a packed block of `pages` pages, everything counted."""
    return (pages * (layout.page_bytes + RING_ENTRY_BYTES) + layout.block_meta_bytes) / layout.block_tokens


def smaller(layout: PoolLayout, pages: int) -> float:
    """How many times smaller such a block is than its K and V in 16 bits."""
    return 4 * layout.layers * layout.heads * layout.head_dim / token_bytes(layout, pages)
