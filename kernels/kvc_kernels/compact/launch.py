"""`compact` with kernels for the move: gather, header, quantize, pack and write, for all layers and heads at once."""

from __future__ import annotations

import functools

import torch
import triton

from ..common.format_class import format_class
from ..formats import BF16
from ..layout import BlockFormat, PoolLayout
from ..pages.kernel import exchange_pages
from ..store import PageStore
from ..tiering.quota import keep_all
from .pack_kernel import pack_kernel
from .reference import check_block_format, compact
from .repack_kernel import order_kernel, repack_kernel

INTERPRET = triton.knobs.runtime.interpret
WARPS, MAX_WARPS = 4, 16
WARP_ELEMENTS = 4096  # key elements that a warp keeps in registers
MAX_REGISTERS = 128  # four CTAs of four warps per SM


@functools.lru_cache
def _prepared(layout: PoolLayout, to: BlockFormat) -> tuple[tuple[int, ...], ...]:
    """Classes of the uncompressed pages and of both tiers, () for a missing one; cached, and `to` is checked once."""
    check_block_format(layout, to)
    return tuple(() if f is None else format_class(layout.page(f)) for f in (BF16, to.high, to.low))


def compact_triton(
    store: PageStore, blocks: torch.Tensor, to_format: int, tiers: torch.Tensor | None, *, from_format: int
) -> torch.Tensor:
    """`compact` with the same bytes, in a fixed number of launches for all layers, heads and blocks.

    `tiers=None` means that every token is kept. With a tensor, the host could only know this by waiting for the device.
    """
    layout = store.layout
    to, source, n = store.block_formats[to_format], store.block_formats[from_format], blocks.numel()
    if not to.high.packed or not n:
        return compact(store, blocks, to_format, tiers, from_format=from_format)
    if source.high.packed and tiers is None:
        tiers = keep_all(n, layout, store.device)
    if tiers is not None:
        tiers = tiers.reshape(n * layout.layers * layout.heads, layout.block_tokens).contiguous()
    move = _repack if source.high.packed else _pack
    return move(store, blocks.long(), to_format, tiers, source)


def _pack_constants(store: PageStore, to_format: int, whole: bool) -> tuple[tuple, dict[str, int]]:
    """Constants and launch options of the pack kernel. `whole`: every token is kept."""
    if (cached := store.launch_constants.get(("pack", to_format, whole))) is None:
        layout, p = store.layout, store.layout.block_tokens
        plain, high, low = _prepared(layout, store.block_formats[to_format])
        padded = triton.next_power_of_2(p)
        elements = padded * layout.head_dim
        hold = whole and elements <= WARP_ELEMENTS * MAX_WARPS
        options = {"num_warps": max(WARPS, elements // WARP_ELEMENTS) if hold else WARPS}
        if hold and high.key_bits > 2 and not INTERPRET:
            options["maxnreg"] = MAX_REGISTERS
        constants = (
            layout.layers * layout.heads, layout.head_pages_bf16, layout.head_dim, p, padded, layout.page_bytes, plain,
            high, low, layout.has_scores, whole, hold,
        )  # fmt: skip
        cached = store.launch_constants["pack", to_format, whole] = constants, options
    return cached


def _pack(
    store: PageStore, blocks: torch.Tensor, to_format: int, tiers: torch.Tensor | None, source: BlockFormat
) -> torch.Tensor:
    """Pack uncompressed heads. Without tiers the kernel reads keys only once."""
    whole = tiers is None
    constants, options = _pack_constants(store, to_format, whole)
    ids, page_counts, old, pages = exchange_pages(store, blocks, to_format, tiers=tiers)
    # Kernels that ignore an argument still need a tensor of the right dtype.
    order = ids if whole else torch.empty(tiers.shape, dtype=torch.int16, device=tiers.device)
    pack_kernel[(2 * ids.shape[0],)](
        store.pages, old, ids, page_counts, blocks, ids if whole else tiers, order, store.headers,
        store.pages.view(store.dtype), *constants, **options,
    )  # fmt: skip
    return pages


def _repack(
    store: PageStore, blocks: torch.Tensor, to_format: int, tiers: torch.Tensor, source: BlockFormat
) -> torch.Tensor:
    """Repack packed heads. Their key headers stay."""
    layout, p, to = store.layout, store.layout.block_tokens, store.block_formats[to_format]
    _, high, low = _prepared(layout, to)
    tiers_from = tuple(x for x in _prepared(layout, source)[1:] if x)
    where, order = torch.empty((2, *tiers.shape), dtype=torch.int16, device=store.device)
    counts = torch.empty((len(tiers), 2), dtype=torch.int32, device=store.device)
    order_kernel[(len(tiers),)](
        store.pages, store.table[blocks], store.counts[blocks], tiers, where, order, counts, layout.head_pages_bf16, p,
        triton.next_power_of_2(p), layout.page_bytes, tiers_from, to.low is not None, layout.has_scores, num_warps=4,
    )  # fmt: skip
    exchange = exchange_pages(store, blocks, to_format, counts=counts)
    # No fused multiply-add: the reference rounds product and sum separately.
    repack_kernel[(len(tiers),)](
        store.pages, exchange.old, exchange.ids, exchange.page_counts, counts, where, order, layout.head_pages_bf16,
        layout.head_dim, p, layout.page_bytes, tiers_from, high, low, layout.has_scores, num_warps=8,
        enable_fp_fusion=False,
    )  # fmt: skip
    return exchange.pages
