"""Attention over rows as the server would read them. q `[Hq, n, D]`, k and v `[H, S, D]`, Hq = H * G."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvc_kernels.common.softmax import causal_mask

# K, V of whole blocks [H, NB, P, D] -> what reading them back gives.
Stored = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, valid: torch.Tensor | None = None
) -> torch.Tensor:
    """The n queries are those of the last n of S tokens; `valid` bool `[H, S]` is False for dropped ones."""
    group = q.shape[0] // k.shape[0]
    mask = causal_mask(0, q.shape[1], k.shape[1], q.shape[1], q.device)
    if valid is not None:
        mask = mask & valid.repeat_interleave(group, 0).unsqueeze(1)
    k, v = (x.repeat_interleave(group, 0).unsqueeze(0) for x in (k, v))
    return scaled_dot_product_attention(q.unsqueeze(0), k, v, attn_mask=mask, scale=scale)[0]


def by_block(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, block: int, stored: Stored | None
) -> torch.Tensor:
    """A query sees the blocks before its own as they will be `stored`, and its own as it is; None: all as is.

    The same order of sums for everything that is stored, so that an exact pass differs from another in nothing but the
    rows.
    """
    p, n = block, q.shape[1]
    whole = n // p
    if stored is not None:
        later = stored(*(x[:, : whole * p].unflatten(1, (whole, p)) for x in (k, v)))
        k, v = k.clone(), v.clone()
    out = torch.empty_like(q)
    for j in range(-(-n // p)):
        begin, end = j * p, min((j + 1) * p, n)
        out[:, begin:end] = causal(q[:, begin:end], k[:, :end], v[:, :end], scale)
        if stored is not None and j < whole:
            k[:, begin:end], v[:, begin:end] = later[0][:, j], later[1][:, j]
    return out
