"""Rows as their packed block will return them, before it is packed.

For rungs that keep every token in one format: what a block will hold is then known from its own rows, layer by layer.
"""

from __future__ import annotations

import torch

from ..common import quant
from ..layout import Format, PoolLayout


def as_stored(
    layout: PoolLayout, fmt: Format, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """K, V `[..., P, D]` of whole blocks -> the same shapes and dtype, quantised to `fmt` and back.

    Bit for bit what `compact` would store and an extend would read: the key header of a block is taken over all of its
    P tokens.
    """
    header = quant.key_header(k, torch.ones(k.shape[:-1], dtype=torch.bool, device=k.device))
    keys = quant.dequantise_keys(quant.quantise_keys(k, header, fmt.key_bits), header, fmt.key_bits)
    values = quant.dequantise_tokens(*quant.quantise_tokens(v, fmt.value_bits, layout.page(fmt).value_groups))
    return keys.to(k.dtype), values.to(v.dtype)
