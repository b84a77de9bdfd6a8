"""Fake-quantized rows: the values that a block will have once it is packed.

For block formats that keep every token in one format, whose packed content follows from the block's own rows, layer by
layer.
"""

from __future__ import annotations

import torch

from ..common import quant
from ..formats import Format
from ..layout import PoolLayout


def fake_quantize(
    layout: PoolLayout, fmt: Format, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fake-quantize K, V `[..., P, D]` of whole blocks to `fmt`, in the same shapes and dtype.

    Bit for bit the rows that a prefill would read after `compact`. The key header of a block covers all of its P
    tokens.
    """
    header = quant.key_header(k, torch.ones(k.shape[:-1], dtype=torch.bool, device=k.device))
    keys = quant.dequantize_keys(quant.quantize_keys(k, header, fmt.key_bits), header, fmt.key_bits)
    values = quant.dequantize_tokens(*quant.quantize_tokens(v, fmt.value_bits, layout.page(fmt).value_groups))
    return keys.to(k.dtype), values.to(v.dtype)
