"""`Budget`: target size of packed blocks, as a ratio to bf16 (`4x`) or in bytes per token."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvc_kernels.layout import RING_ENTRY_BYTES, PoolLayout
from sglang_kvc.errors import ConfigError, flag


@dataclass(frozen=True)
class Budget:
    """Exactly one of `ratio` (times smaller than K and V in 16 bits) and `token_bytes` (over all layers of a rank)."""

    ratio: float | None = None
    token_bytes: float | None = None

    @classmethod
    def parse(cls, text: str) -> Budget:
        """'4x', '3.5x' or '1200'."""
        m = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(x?)", text.strip().lower())
        if not m or float(m[1]) <= 0:
            raise ConfigError(
                f"{flag('budget')} {text!r} is neither a ratio nor a number of bytes; give a compression ratio to "
                f"bf16, like 4x, or the bytes that a token may take, like 1200."
            )
        return cls(ratio=float(m[1])) if m[2] else cls(token_bytes=float(m[1]))

    def __str__(self) -> str:
        """Text that `parse` turns into an equal budget."""
        number = self.token_bytes if self.ratio is None else self.ratio
        return f"{int(number) if number == int(number) else number}{'' if self.ratio is None else 'x'}"

    def block_bytes(self, layout: PoolLayout) -> float:
        """Bytes that a packed block may have, all metadata included."""
        if self.token_bytes is not None:
            return self.token_bytes * layout.block_tokens
        return 4 * layout.layers * layout.heads * layout.head_dim * layout.block_tokens / self.ratio

    def pages(self, layout: PoolLayout) -> float:
        """Pages that a packed block may have on average; below 0 if even its tables, counts and scales exceed the
        budget."""
        return (self.block_bytes(layout) - layout.block_meta_bytes) / (layout.page_bytes + RING_ENTRY_BYTES)


def token_bytes(layout: PoolLayout, pages: int) -> float:
    """Bytes per token of a packed block of `pages` pages, all metadata included."""
    return (pages * (layout.page_bytes + RING_ENTRY_BYTES) + layout.block_meta_bytes) / layout.block_tokens


def compression(layout: PoolLayout, pages: int) -> float:
    """Compression ratio of a packed block of `pages` pages to its K and V in 16 bits."""
    return 4 * layout.layers * layout.heads * layout.head_dim / token_bytes(layout, pages)
