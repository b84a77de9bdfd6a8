"""Sizing: pages and blocks that fit a number of bytes, and the geometry of both."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvc_kernels.formats import BF16, FORMATS, Format
from kvc_kernels.layout import (
    RING_ENTRY_BYTES,
    TOKEN_MULTIPLE,
    BlockFormat,
    PageLayout,
    PoolLayout,
    RecordLayout,
    align_up,
    choose_ladder_page_bytes,
    choose_page_bytes,
    page_bytes_for,
)

if TYPE_CHECKING:
    from ..options.config import KvcConfig
    from ..policies import Policy

# Maximum number of blocks that share the memory of one uncompressed block, and the maximum assumed number if the packed
# size depends on the data or on the prompt's budget. They bound the tables, which cost bytes even for empty heads.
MAX_BLOCK_RATIO, INEXACT_BLOCK_RATIO = 16.0, 8.0
MIN_BLOCKS = 4  # uncompressed blocks that every pool holds
# Share of the pages that blocks are never charged for: one wave of compactions draws its destinations from it.
RESERVE_SHARE = 1 / 32
# Host memory is handed out in multiples of this many bytes.
UNIT_ALIGN = 4096
# Buffers of blocks on their way to the host and on their way back: one is filled while another is emptied.
SAVE_BUFFERS, LOAD_BUFFERS = 3, 2
# Maximum bytes of a buffer, and its maximum share of the pool. A copy of 16 MiB reaches the bus's rate. Larger copies
# are fewer, and each costs the scheduler's thread about 0.1 ms.
BUFFER_BYTES, BUFFER_SHARE = 56 << 20, 1 / 160
# Tokens of uncompressed prefixes that the prompts of one prefill may stage together; a longer window raises it.
STAGED_TOKENS = 16384


def make_layout(config: KvcConfig, policy: Policy, *, layers: int, heads: int, head_dim: int) -> PoolLayout:
    """The pool's geometry. Page bytes are searched unless the user sets them."""
    formats = [FORMATS[f] for f in policy.formats()]
    options: dict[str, Any] = {"head_dim": head_dim, "has_scores": policy.collects_scores}
    search = {"block_tokens": config.block_size, **options}
    if config.page_bytes:
        page_bytes = config.page_bytes
    elif policy.page_tokens:
        page_bytes = _page_of(formats, policy.page_tokens, **options)
    elif policy.ladder and (ladder := choose_ladder_page_bytes(formats[: len(policy.ladder)], **search)):
        page_bytes = ladder
    else:
        whole = policy.fake_quant_format() is not None
        page_bytes = choose_page_bytes(formats, whole=whole, **search)
    return PoolLayout(layers, heads, head_dim, config.block_size, page_bytes, has_scores=policy.collects_scores)


def _page_of(formats: list[Format], tokens: int, **options) -> int:
    """Bytes of a page of `tokens` tokens in the first format, or of the smallest larger number that lets every format
    hold one."""
    while True:
        size = page_bytes_for(formats[0], tokens, **options)
        pages = [PageLayout(f, options["head_dim"], size, options["has_scores"]) for f in formats]
        if all(page.tokens for page in (*pages, replace(pages[0], format=BF16))):
            return size
        tokens += TOKEN_MULTIPLE


@dataclass(frozen=True)
class Sizing:
    """Sizes of one pool in `num_bytes` of memory.

    num_blocks: number of block ids, enough for a pool of compressed blocks.
    reserve_pages: pages that only compactions draw on.
    capacity_tokens: tokens that fit uncompressed, which SGLang uses as its number of tokens.
    staged_tokens: maximum tokens of uncompressed cached blocks that the prompts of one prefill may together stage
        fake-quantized; a single prompt may exceed it. 0: no limit, because nothing is staged.
    """

    num_bytes: int
    num_pages: int
    num_blocks: int
    reserve_pages: int
    capacity_tokens: int
    staged_tokens: int = 0

    @property
    def chargeable_pages(self) -> int:
        return self.num_pages - 1 - self.reserve_pages


def size_server(
    num_bytes: int, config: KvcConfig, policy: Policy, layout: PoolLayout, block_formats: tuple[BlockFormat, ...],
    itemsize: int
) -> Sizing:
    """Size the pool in the memory left by the staged rows of one layer and the buffers of the host tier. `itemsize`:
    bytes of an uncompressed element.

    Staged tokens never exceed those that fill all memory uncompressed, so staging takes at most 1 / L of it.

    Raises ValueError, in one sentence, when not even `MIN_BLOCKS` uncompressed blocks fit.
    """
    row_bytes = 2 * layout.heads * layout.head_dim * itemsize
    inexact_ratio = min(INEXACT_BLOCK_RATIO, policy.assumed_block_ratio(layout))
    least_ratio = 1.0 if config.one_shot is None else INEXACT_BLOCK_RATIO
    stages = config.window and policy.fake_quant_format(policy.format_id_of(None)) is not None

    def sized(total: int) -> tuple[Sizing, dict[str, int]]:
        """The pool in `total` bytes, and the bytes that it leaves for other purposes."""
        staged = min(max(config.window, STAGED_TOKENS), total // (layout.layers * row_bytes)) if stages else 0
        extra = {"the rows that a prefill with --kvc-window stages": staged * row_bytes}
        if config.host_memory:
            extra["the buffers of --kvc-host-memory"] = HostLayout.of(layout, block_formats, total).device_bytes
        sizing = size_pool(total - sum(extra.values()), layout, block_formats, inexact_ratio, least_ratio)
        return replace(sizing, staged_tokens=staged), extra

    minimum = MIN_BLOCKS * layout.block_tokens
    sizing, extra = sized(num_bytes)
    if sizing.capacity_tokens < minimum:
        larger = itertools.count(num_bytes // 2**20 + 1)
        enough = next(mib for mib in larger if sized(mib << 20)[0].capacity_tokens >= minimum)
        parts = [f"{size / 2**20:.1f} MiB for {what}" for what, size in extra.items() if size]
        besides = f" besides {' and '.join(parts)}" if parts else ""
        raise ValueError(
            f"the KV memory of {num_bytes / 2**20:.1f} MiB holds fewer than {MIN_BLOCKS} uncompressed blocks of "
            f"{layout.block_tokens} tokens{besides}; give at least {enough}MiB (--kvc-memory, "
            f"--max-total-tokens or --mem-fraction-static) or a smaller --kvc-block-size"
        )
    return sizing


@dataclass(frozen=True)
class HostLayout:
    """Geometry of the host tier.

    record: bytes of a block in host memory.
    unit_bytes: host memory is handed out in units of this size. If all records have known sizes, it is the smallest
        record or a fraction of it (down to a quarter), whichever wastes least. Otherwise it is a quarter of the largest
        record of the smallest storage format.
    buffer_bytes: size of one buffer between pages and host memory, at least one uncompressed block.
    """

    record: RecordLayout
    unit_bytes: int
    buffer_bytes: int

    @classmethod
    def of(cls, layout: PoolLayout, block_formats: tuple[BlockFormat, ...], pool_bytes: int) -> HostLayout:
        record, formats = RecordLayout(layout), block_formats[1:] or block_formats[:1]
        sizes = [record.num_bytes(f.pages or layout.block_pages_bf16) for f in formats]
        exact = all(f.exact for f in formats)
        units = [align_up(-(-min(sizes) // parts), UNIT_ALIGN) for parts in ((1, 2, 3, 4) if exact else (4,))]

        def cost(unit: int) -> float:
            """Bytes of all units relative to those of the records; a smaller unit must save 3 % of a record."""
            return sum(-(-size // unit) * unit / size for size in sizes) + 0.03 * units.index(unit)

        unit = min(units, key=cost)
        largest = align_up(record.num_bytes(layout.block_pages_bf16), unit)
        return cls(record, unit, max(largest, min(BUFFER_BYTES, int(pool_bytes * BUFFER_SHARE))))

    def units_for(self, pages: int) -> int:
        """Units of the record of a block with `pages` pages."""
        return -(-self.record.num_bytes(pages) // self.unit_bytes)

    @property
    def device_bytes(self) -> int:
        """Device memory of all buffers."""
        return (SAVE_BUFFERS + LOAD_BUFFERS) * self.buffer_bytes


def size_pool(
    num_bytes: int, layout: PoolLayout, block_formats: tuple[BlockFormat, ...],
    inexact_ratio: float = INEXACT_BLOCK_RATIO, least_ratio: float = 1.0
) -> Sizing:
    """Split `num_bytes` between pages and per-block metadata (tables, headers, counts).

    There is metadata for as many blocks as share the memory of an uncompressed block: by their pages if these are
    known, `inexact_ratio` if the data decide them, and at least `least_ratio`.
    """
    bf16 = layout.block_pages_bf16
    ratios = [bf16 / max(r.pages, 1) if r.exact else inexact_ratio for r in block_formats[1:]]
    ratio = min(max([least_ratio, *ratios]), MAX_BLOCK_RATIO)
    pages = int(num_bytes / (layout.page_bytes + RING_ENTRY_BYTES + ratio * layout.block_meta_bytes / bf16))
    blocks = int(pages / bf16 * ratio) + 2
    largest_target = max([r.pages for r in block_formats[1:]] or [0])
    reserve = max(largest_target, int(pages * RESERVE_SHARE)) if largest_target else 0
    capacity = (pages - 1 - reserve) // bf16 * layout.block_tokens
    return Sizing(num_bytes, pages, blocks, reserve, capacity)
