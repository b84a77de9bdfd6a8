"""Conversion between codes and the bytes of pages, over any leading dimensions. `layout.PageLayout` has the offsets."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..layout import PageLayout


class PageRows(NamedTuple):
    """Tokens of pages in slot order; absent segments are None. T tokens per page, D head_dim, G value groups.

    `keys`, `values` `[..., T, D]`: uint8 codes, or the model dtype in bf16 pages; `value_meta` fp16 `[..., G, 2, T]`;
    `scores` fp32 `[..., T]`; `positions` int16 `[..., T]`.
    """

    keys: torch.Tensor
    values: torch.Tensor
    value_meta: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    positions: torch.Tensor | None = None


def pack_features(codes: torch.Tensor, bits: int, dim: int = -1) -> torch.Tensor:
    """uint8 codes with D features along `dim` -> uint8 bytes with D*bits/8 there, in equal parts."""
    if bits == 8:
        return codes
    out = None
    for j, part in enumerate(codes.chunk(8 // bits, dim)):
        out = part.clone() if out is None else out.bitwise_or_(part << (j * bits))
    return out


def unpack_features(packed: torch.Tensor, bits: int, dim: int = -1) -> torch.Tensor:
    """Inverse of `pack_features`."""
    if bits == 8:
        return packed
    mask = (1 << bits) - 1
    return torch.cat([(packed >> (j * bits)) & mask for j in range(8 // bits)], dim)


def segment(layout: PageLayout, pages: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor | None:
    """View of one segment of uint8 pages `[..., page_bytes]` as `[..., elements]` of `dtype`; None if absent. Writing
    to the view writes to the pages.
    """
    at, size = layout.segments[name]
    if not size:
        return None
    width = dtype.itemsize
    typed = pages if dtype == torch.uint8 else pages.view(dtype)
    return typed[..., at // width : (at + size) // width]


def bf16_rows(layout: PageLayout, pages: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of K and V `[..., T, D]` of uncompressed pages `[..., page_bytes]` in the model dtype."""
    shape = (layout.tokens, layout.head_dim)
    k = segment(layout, pages, "key_codes", dtype).unflatten(-1, shape)
    v = segment(layout, pages, "value_codes", dtype).unflatten(-1, shape)
    return k, v


def key_bytes(layout: PageLayout, pages: torch.Tensor) -> torch.Tensor:
    """View of packed key codes `[..., T, D*kb/8]`."""
    return segment(layout, pages, "key_codes", torch.uint8).unflatten(-1, (layout.tokens, layout.key_row_bytes))


def value_bytes(layout: PageLayout, pages: torch.Tensor) -> torch.Tensor:
    """View of packed, transposed value codes `[..., D*vb/8, T]`."""
    return segment(layout, pages, "value_codes", torch.uint8).unflatten(-1, (layout.value_row_bytes, layout.tokens))


def value_meta(layout: PageLayout, pages: torch.Tensor) -> torch.Tensor:
    """View of value scale and zero, fp16 `[..., G, 2, T]`."""
    return segment(layout, pages, "value_meta", torch.float16).unflatten(-1, (layout.value_groups, 2, layout.tokens))


def read_page(layout: PageLayout, pages: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> PageRows:
    """Tokens of uint8 pages `[..., page_bytes]`. `dtype` is the model dtype, which only bf16 pages use."""
    scores = segment(layout, pages, "scores", torch.float32)
    if not layout.format.packed:
        return PageRows(*bf16_rows(layout, pages, dtype), scores=scores)
    return PageRows(
        keys=unpack_features(key_bytes(layout, pages), layout.format.key_bits),
        values=unpack_features(value_bytes(layout, pages), layout.format.value_bits, -2).transpose(-1, -2),
        value_meta=value_meta(layout, pages),
        scores=scores,
        positions=segment(layout, pages, "positions", torch.int16),
    )


def _blank(x: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    return x if valid is None else x.masked_fill(~valid, 0)


def write_page(layout: PageLayout, rows: PageRows, valid: torch.Tensor | None = None) -> torch.Tensor:
    """uint8 pages `[..., page_bytes]` of token rows (shapes of `PageRows`).

    Slots where `valid` (bool `[..., T]`) is false, the padding between segments and the slack after them are zero, so
    the bytes of a page depend on its tokens alone. Segments that `rows` lacks stay zero.
    """
    pages = torch.zeros((*rows.keys.shape[:-2], layout.page_bytes), dtype=torch.uint8, device=rows.keys.device)
    by_row = None if valid is None else valid.unsqueeze(-1)
    if not layout.format.packed:
        k, v = bf16_rows(layout, pages, rows.keys.dtype)
        k.copy_(_blank(rows.keys, by_row))
        v.copy_(_blank(rows.values, by_row))
    else:
        f = layout.format
        key_bytes(layout, pages).copy_(_blank(pack_features(rows.keys, f.key_bits), by_row))
        value_bytes(layout, pages).copy_(_blank(pack_features(rows.values, f.value_bits), by_row).transpose(-1, -2))
        value_meta(layout, pages).copy_(_blank(rows.value_meta, None if valid is None else valid[..., None, None, :]))
        if (positions := segment(layout, pages, "positions", torch.int16)) is not None:
            positions.copy_(_blank(rows.positions, valid))
    scores = segment(layout, pages, "scores", torch.float32)
    if scores is not None and rows.scores is not None:
        scores.copy_(_blank(rows.scores, valid))
    return pages
