"""Byte layout of pages: segments and offsets. No other module computes a byte offset within a page.

Terms: a *block* is P consecutive, aligned tokens of a sequence. A *page* is a fixed number of bytes that belongs to one
(block, layer, KV head) and has one *format* while it is allocated. A `BlockFormat` is the storage format of a whole
block: a high format and an optional low one. `block_formats` lists those of a store, uncompressed first; a format id
indexes it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property, lru_cache

from .formats import BF16, Format

SEGMENT_ALIGN = 16  # bytes, the widest vector load of a GPU thread
TOKEN_MULTIPLE = 16  # a packed page holds whole MMA rows of tokens, so that no vector load crosses a tile
WHOLE_PAGE_TOKENS = 64  # the decode kernel's tile; docs/kernels/decode.md
VALUE_GROUP_2BIT = 32  # features per scale at 2 bits (MiniKV takes 16); 4 and 8 bits use one group
RING_ENTRY_BYTES = 4  # int32: a page's entry in the ring of free pages


def align_up(n: int, m: int) -> int:
    return -(-n // m) * m


@dataclass(frozen=True)
class PageLayout:
    """Five segments of one page in one format; all offsets in bytes from the page start.

    With T tokens per page and D = head_dim (K and V alike):

    | segment       | shape and dtype     | present when                        |
    |---------------|---------------------|-------------------------------------|
    | `key_codes`   | uint8 `[T, D*kb/8]` | always (bf16: model dtype `[T, D]`) |
    | `value_codes` | uint8 `[D*vb/8, T]` | always (bf16: model dtype `[T, D]`) |
    | `value_meta`  | fp16 `[G, 2, T]`    | packed; G = D/32 at 2 bits, else 1  |
    | `scores`      | fp32 `[T]`          | `has_scores`                        |
    | `positions`   | int16 `[T]`         | `has_scores` and packed             |

    Sub-byte codes are packed along features in equal parts: field j (from the low bits) of byte c holds feature
    `j * D*bits/8 + c`, so that unpacked parts concatenate to natural order. Values are stored transposed (tokens
    contiguous) because the PV product reduces over tokens. Meta row 0 is the scale, row 1 the zero:
    `x ~ scale * code + zero`. Positions count from the block's first token.
    """

    format: Format
    head_dim: int
    page_bytes: int
    has_scores: bool

    @property
    def value_groups(self) -> int:
        return self.head_dim // VALUE_GROUP_2BIT if self.format.value_bits == 2 else 1

    @property
    def key_row_bytes(self) -> int:
        return self.head_dim * self.format.key_bits // 8

    @property
    def value_row_bytes(self) -> int:
        """Bytes of one token's value codes. Packed pages store them transposed."""
        return self.head_dim * self.format.value_bits // 8

    def _segments(self, tokens: int) -> dict[str, tuple[int, int]]:
        f, out, at = self.format, {}, 0
        sizes = {
            "key_codes": tokens * self.key_row_bytes,
            "value_codes": tokens * self.value_row_bytes,
            "value_meta": 4 * tokens * self.value_groups if f.packed else 0,
            "scores": 4 * tokens if self.has_scores else 0,
            "positions": 2 * tokens if self.has_scores and f.packed else 0,
        }
        for name, size in sizes.items():
            out[name] = (at, size)
            at = align_up(at + size, SEGMENT_ALIGN)
        out["end"] = (at, 0)
        return out

    @cached_property
    def tokens(self) -> int:
        """T, tokens per page: a multiple of 16 if packed, of 4 in bf16. 0 if no such group fits."""
        step = TOKEN_MULTIPLE if self.format.packed else 4
        t = 0
        while self._segments(t + step)["end"][0] <= self.page_bytes:
            t += step
        return t

    @cached_property
    def segments(self) -> dict[str, tuple[int, int]]:
        """name -> (offset, bytes) of each segment. An absent segment has 0 bytes."""
        return {k: v for k, v in self._segments(self.tokens).items() if k != "end"}

    def offset(self, segment: str) -> int:
        return self.segments[segment][0]

    @property
    def used_bytes(self) -> int:
        """Bytes of all segments of a full page, without the slack after them."""
        return self._segments(self.tokens)["end"][0]


_page = lru_cache(maxsize=256)(PageLayout)


@dataclass(frozen=True)
class BlockFormat:
    """Storage format of a whole block: a high format and an optional low format below it.

    `pages` is the maximum number of pages of a block over all layers and local heads. With `exact` the block takes
    exactly that many, known before planning (quota). Otherwise the device reports the count (thresholds).
    """

    high: Format
    low: Format | None = None
    pages: int = 0
    exact: bool = True


@dataclass(frozen=True)
class PoolLayout:
    """Geometry of one pool: L layers, H local KV heads, head_dim D, blocks of P tokens, pages of `page_bytes` bytes."""

    layers: int
    heads: int
    head_dim: int
    block_tokens: int
    page_bytes: int
    has_scores: bool = False

    def page(self, fmt: Format) -> PageLayout:
        """The page layout of `fmt`; cached, because launches and the scheduler ask for it constantly."""
        return _page(fmt, self.head_dim, self.page_bytes, self.has_scores)

    def pages_for(self, fmt: Format, tokens: int) -> int:
        """Pages that one head needs for `tokens` tokens in `fmt`."""
        return -(-tokens // self.page(fmt).tokens)

    @cached_property
    def head_pages_bf16(self) -> int:
        """E: pages of one head of an uncompressed block, and the entries of a block-table row."""
        return self.pages_for(BF16, self.block_tokens)

    @cached_property
    def block_pages_bf16(self) -> int:
        return self.layers * self.heads * self.head_pages_bf16

    def block_pages(self, fmt: Format, tokens_per_head: int | None = None) -> int:
        n = self.block_tokens if tokens_per_head is None else tokens_per_head
        return self.layers * self.heads * self.pages_for(fmt, n)

    @property
    def header_bytes(self) -> int:
        """Bytes of the fp16 scale and zero `[2, D]` of the key channels, per block and head."""
        return 4 * self.head_dim

    @property
    def block_meta_bytes(self) -> int:
        """Bytes of a block id without its pages: table row, counts, header, storage format, query count."""
        per_head = 4 * self.head_pages_bf16 + 2 * 2 + self.header_bytes
        return self.layers * self.heads * per_head + 1 + 4


@dataclass(frozen=True)
class RecordLayout:
    """A block outside the pool, as one run of bytes that names no page. All offsets are from the record's start.

    | segment       | shape and dtype             | content                                           |
    |---------------|-----------------------------|---------------------------------------------------|
    | `counts`      | int16 `[L, H, 2]`           | tokens stored high, low                           |
    | `query_count` | int32 `[1]`                 | queries that the block's attention scores cover   |
    | `headers`     | fp16 `[L, H, 2, D]`         | scale and zero of the key channels                |
    | `pages`       | uint8 `[pages, page_bytes]` | by layer and head; high pages, then low ones      |
    """

    pool: PoolLayout

    @cached_property
    def offsets(self) -> dict[str, int]:
        heads, out, at = self.pool.layers * self.pool.heads, {}, 0
        sizes = {"counts": 4 * heads, "query_count": 4, "headers": heads * self.pool.header_bytes, "pages": 0}
        for name, size in sizes.items():
            out[name] = at
            at = align_up(at + size, SEGMENT_ALIGN)
        return out

    def num_bytes(self, pages: int) -> int:
        """Bytes of the record of a block with `pages` pages."""
        return self.offsets["pages"] + pages * self.pool.page_bytes


def page_bytes_for(fmt: Format, tokens: int, *, head_dim: int, has_scores: bool) -> int:
    """The page size in bytes that holds exactly `tokens` tokens of `fmt`."""
    page = PageLayout(fmt, head_dim, 1 << 30, has_scores)
    return align_up(page._segments(tokens)["end"][0], 16)


def choose_ladder_page_bytes(
    formats: list[Format], *, head_dim: int, block_tokens: int, has_scores: bool
) -> int | None:
    """The page size in bytes for blocks that move from the first of `formats` down to the last; None if no size fits.

    A block must take fewer pages in the last format than in the first. The candidates hold exactly 64, 48, 32 or 16
    tokens of one format. The result is the candidate at which blocks take the fewest bytes on average over `formats`,
    relative to their codes and scales; the largest among equals.
    """
    best, least = None, float("inf")
    for tokens, fmt in itertools.product((WHOLE_PAGE_TOKENS, 48, 32, 16), formats):
        size = page_bytes_for(fmt, tokens, head_dim=head_dim, has_scores=has_scores)
        plain, *pages = (PageLayout(f, head_dim, size, has_scores) for f in (BF16, *formats))
        if not plain.tokens or not all(page.tokens for page in pages):
            continue
        counts = [-(-block_tokens // page.tokens) for page in pages]
        cost = sum(n * size * page.tokens / page.used_bytes for n, page in zip(counts, pages))
        if counts[-1] < counts[0] and cost < least - 1e-9:
            best, least = size, cost
    return best


def choose_page_bytes(
    formats: list[Format], *, head_dim: int, block_tokens: int, has_scores: bool, whole: bool = False
) -> int:
    """The page size in bytes with the least slack in the worst packed format of `formats`.

    The search covers sizes that hold 8 to 16 bf16 tokens, in steps of 16 bytes; ties go to the smaller page. With a
    single packed format, the unused part of a block's last page also counts. With two tiers the token counts are
    ragged, and it does not.

    `whole`: every token of a block has one format, usually the first of `formats`. The page then holds exactly 64, 32
    or 16 tokens of that format: the number that costs the other formats least, and the largest among equals. Decode is
    fastest if a single page holds a tile of WHOLE_PAGE_TOKENS tokens.
    """
    if whole and formats[0].packed:
        steps = [t for t in (WHOLE_PAGE_TOKENS, 32, 16) if block_tokens % t == 0]
        sizes = [page_bytes_for(formats[0], t, head_dim=head_dim, has_scores=has_scores) for t in steps]

        def cost(size: int) -> float:
            """Bytes of a block in the worst format at this size, relative to the bytes of its codes and scales."""
            worst = 1.0
            for f in formats[1:]:
                page = PageLayout(f, head_dim, size, has_scores)
                if not page.tokens:
                    return float("inf")
                block_bytes = -(-block_tokens // page.tokens) * size
                worst = max(worst, block_bytes / (page.used_bytes / page.tokens * block_tokens))
            return worst

        return min(sizes, key=cost)
    best, best_waste = 0, float("inf")
    bf16_token = 4 * head_dim + (4 if has_scores else 0)
    packed = [f for f in formats if f.packed] or [BF16]
    for size in range(align_up(8 * bf16_token, 16), 16 * bf16_token + 17, 16):
        waste = 0.0
        for f in packed:
            page = PageLayout(f, head_dim, size, has_scores)
            if page.tokens == 0:
                waste = float("inf")
                break
            slack = size / page.used_bytes
            if len(packed) == 1:
                slack *= -(-block_tokens // page.tokens) * page.tokens / block_tokens
            waste = max(waste, slack - 1)
        if waste < best_waste - 1e-9:
            best, best_waste = size, waste
    if not best:
        raise ValueError(f"no page size holds 16 tokens of {[f.name for f in packed]} at head_dim {head_dim}")
    return best
