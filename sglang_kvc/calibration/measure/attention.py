"""Attention over fake-quantized rows. q is `[Hq, n, D]`, k and v are `[H, S, D]`, Hq = H * G."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvc_kernels.ops import causal_mask

# Fake-quantizes K, V of whole blocks, `[H, NB, P, D]`.
FakeQuantize = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, valid: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention of the last n of S tokens to all S. `valid` bool `[H, S]` is False for dropped tokens."""
    group = q.shape[0] // k.shape[0]
    mask = causal_mask(0, q.shape[1], k.shape[1], q.shape[1], q.device)
    if valid is not None:
        mask = mask & valid.repeat_interleave(group, 0).unsqueeze(1)
    k, v = (x.repeat_interleave(group, 0).unsqueeze(0) for x in (k, v))
    return scaled_dot_product_attention(q.unsqueeze(0), k, v, attn_mask=mask, scale=scale)[0]


def by_block(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, block: int, fake_quantize: FakeQuantize | None
) -> torch.Tensor:
    """Attention to earlier blocks fake-quantized and to the query's own block unquantized, in blocks of `block` tokens.

    `fake_quantize` None: attention to all blocks unquantized, with the same order of sums, so that two passes differ
    only in the rows.
    """
    p, n = block, q.shape[1]
    full = n // p
    if fake_quantize is not None:
        quantized = fake_quantize(*(x[:, : full * p].unflatten(1, (full, p)) for x in (k, v)))
        k, v = k.clone(), v.clone()
    out = torch.empty_like(q)
    for j in range(-(-n // p)):
        begin, end = j * p, min((j + 1) * p, n)
        out[:, begin:end] = causal(q[:, begin:end], k[:, :end], v[:, :end], scale)
        if fake_quantize is not None and j < full:
            k[:, begin:end], v[:, begin:end] = quantized[0][:, j], quantized[1][:, j]
    return out
