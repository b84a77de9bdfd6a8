"""Format classes: the constants that a kernel is compiled for, one record per format and side of the block table."""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl

from ..formats import BF16, Format
from ..layout import PageLayout
from ..store import PageStore


class FormatClass(NamedTuple):
    """Compile-time numbers of one format on one side of the block table; offsets in bytes from the page start.

    Every kernel takes this record in this order and reads it by the indices below, because a compiled kernel sees a
    plain tuple. `struct Class` of `extend/cuda/extend.cu` has the same fields.
    """

    key_bits: int
    value_bits: int
    tokens: int  # tokens per page
    side: int  # 0: high tier, from the left end of a table row; 1: low tier, from the right
    value_codes: int
    value_meta: int
    scores: int
    positions: int
    used_bytes: int  # bytes of all segments of a page
    tile_tokens: int = 0  # tokens per iteration (decode)
    tile_pages: int = 0  # pages that a tile touches at most (decode and its scores)
    stages: int = 0  # software pipeline stages (decode)


KEY_BITS: tl.constexpr = tl.constexpr(FormatClass._fields.index("key_bits"))
VALUE_BITS: tl.constexpr = tl.constexpr(FormatClass._fields.index("value_bits"))
TOKENS: tl.constexpr = tl.constexpr(FormatClass._fields.index("tokens"))
SIDE: tl.constexpr = tl.constexpr(FormatClass._fields.index("side"))
VALUE_CODES: tl.constexpr = tl.constexpr(FormatClass._fields.index("value_codes"))
VALUE_META: tl.constexpr = tl.constexpr(FormatClass._fields.index("value_meta"))
SCORES: tl.constexpr = tl.constexpr(FormatClass._fields.index("scores"))
POSITIONS: tl.constexpr = tl.constexpr(FormatClass._fields.index("positions"))
USED_BYTES: tl.constexpr = tl.constexpr(FormatClass._fields.index("used_bytes"))
TILE_TOKENS: tl.constexpr = tl.constexpr(FormatClass._fields.index("tile_tokens"))
TILE_PAGES: tl.constexpr = tl.constexpr(FormatClass._fields.index("tile_pages"))
STAGES: tl.constexpr = tl.constexpr(FormatClass._fields.index("stages"))


def format_class(page: PageLayout, side: int = 0) -> FormatClass:
    """The class of pages laid out like `page` on one side of the table."""
    names = ("value_codes", "value_meta", "scores", "positions")
    return FormatClass(
        page.format.key_bits, page.format.value_bits, page.tokens, side, *(page.offset(n) for n in names),
        page.used_bytes,
    )  # fmt: skip


def format_tiers(store: PageStore) -> list[tuple[Format, int]]:
    """(format, side) pairs that blocks of this store can hold; bf16 first. Side 0 is the high tier."""
    out: list[tuple[Format, int]] = [(BF16, 0)]
    for block_format in store.block_formats[1:]:
        for pair in ((block_format.high, 0), (block_format.low, 1)):
            if pair[0] is not None and pair not in out:
                out.append(pair)
    return out


def format_classes(store: PageStore) -> tuple[FormatClass, ...]:
    """The classes of all `format_tiers` of a store, in that order."""
    return tuple(format_class(store.layout.page(fmt), side) for fmt, side in format_tiers(store))


def format_class_masks(store: PageStore) -> list[int]:
    """Per block format, a mask with bit c set where such a block holds tokens of class c."""
    classes, masks = format_tiers(store), [1]
    for block_format in store.block_formats[1:]:
        low = 0 if block_format.low is None else 1 << classes.index((block_format.low, 1))
        masks.append(1 << classes.index((block_format.high, 0)) | low)
    return masks
