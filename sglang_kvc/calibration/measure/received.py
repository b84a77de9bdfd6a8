"""Attention that each token received from later ones, layer by layer; from it XKV's shares of the layers."""

from __future__ import annotations

import torch

from kvc_kernels import ops
from kvc_kernels.common.softmax import MAX_ELEMENTS, query_weights

# Share of all tokens for which layers are allotted: XKV's gain is at low budgets, and the server scales the shares.
KEPT = 0.25


def received(q: torch.Tensor, k: torch.Tensor, scale: float, ends: tuple[int, ...]) -> list[torch.Tensor]:
    """Sums over the queries before each of `ends` (ascending) of what they pay earlier tokens, fp32 `[H, G, n]` each.

    `q` `[Hq, n, D]`, `k` `[H, n, D]`. What a query pays its own token does not count.
    """
    heads, n = k.shape[:2]
    total = torch.zeros((heads, q.shape[0] // heads, n), device=q.device)
    step, out, at = max(1, MAX_ELEMENTS // (n * q.shape[0])), [], 0
    for end in ends:
        while at < end:
            rows = min(step, end - at)
            # Later tokens are masked: leaving them out saves half of the work.
            w = query_weights(q[:, at : at + rows], k[:, : at + rows], None, 0, rows, scale, 0.0)
            w.diagonal(at, dim1=-2, dim2=-1).zero_()
            total[..., : at + rows] += w.sum(-2)
            at += rows
        out.append(total.clone())
    return out


def retention(importance: torch.Tensor, block: int) -> torch.Tensor:
    """One layer's retention curve fp64 `[P]`: share of a block's importance in its best s + 1 tokens.

    `importance` `[H, n]`. Mean over the heads, which choose their own tokens, and over all whole blocks but the last,
    whose tokens later ones have hardly seen. ValueError for fewer than two blocks.
    """
    blocks = importance.shape[1] // block - 1
    if blocks < 1:
        raise ValueError(f"retention needs two blocks of {block} tokens")
    rows = importance[:, : blocks * block].reshape(-1, block)
    return ops.retention_curves(rows).mean(0).cpu()


def layer_shares(curves: torch.Tensor, kept: float = KEPT) -> torch.Tensor:
    """XKV's Algorithm 1 on `curves` `[L, P]`: each layer's share fp32 `[L]` of `kept` of all tokens; they add up to 1.

    Every layer gets a token at least.
    """
    layers, units = curves.shape
    total = max(layers, round(kept * layers * units))
    units_of = ops.greedy_allocation(curves, total, least=1)
    return torch.tensor(units_of, dtype=torch.float32) / total
