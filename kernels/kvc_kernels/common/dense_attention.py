"""Attention over dense rows in plain torch, shared by the references of decode and extend.

A request whose tokens are all uncompressed goes through `scaled_dot_product_attention` in the form that SGLang's
torch_native backend uses, and returns the same bits.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from .softmax import MAX_ELEMENTS, query_weights


def sdpa(q, k, v, *, scale, mask=None, causal=False) -> torch.Tensor:
    """q `[Hq, N, D]`, k and v `[H, S, D]` -> `[Hq, N, D]`."""
    return scaled_dot_product_attention(
        q.unsqueeze(0),
        k.unsqueeze(0),
        v.unsqueeze(0),
        attn_mask=mask,
        enable_gqa=q.shape[0] != k.shape[0],
        scale=scale,
        is_causal=causal,
    ).squeeze(0)


def explicit_attention(q, k, v, valid, scale: float, logit_cap: float, window: int = -1) -> torch.Tensor:
    """Softmax written out in fp32, for capped logits: `[Hq, new, D]`."""
    step = max(1, MAX_ELEMENTS // (k.shape[1] * q.shape[0]))
    out = torch.empty_like(q)
    for at in range(0, q.shape[1], step):
        rows = min(step, q.shape[1] - at)
        w = query_weights(q, k, valid, at, rows, scale, logit_cap, window)
        o = w.flatten(1, 2) @ v.float()
        out[:, at : at + rows] = o.view(q.shape[0], rows, -1).to(q.dtype)
    return out
