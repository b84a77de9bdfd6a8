"""Attention scores of a text's tokens, layer by layer, and XKV's layer shares from them."""

from __future__ import annotations

import torch

from kvc_kernels import ops
from kvc_kernels.common.softmax import MAX_ELEMENTS, query_weights

# Share of all tokens that the layers divide. XKV gains at low budgets, and the server scales the shares to its own.
KEPT = 0.25


def attention_scores(q: torch.Tensor, k: torch.Tensor, scale: float, ends: tuple[int, ...]) -> list[torch.Tensor]:
    """For each of `ends` (ascending), sums of attention probabilities over the queries before it, fp32 `[H, G, n]`.

    `q` `[Hq, n, D]`, `k` `[H, n, D]`. The probability of a query's own token does not count.
    """
    heads, n = k.shape[:2]
    total = torch.zeros((heads, q.shape[0] // heads, n), device=q.device)
    step, out, at = max(1, MAX_ELEMENTS // (n * q.shape[0])), [], 0
    for end in ends:
        while at < end:
            rows = min(step, end - at)
            # Later tokens are masked; not computing them saves half of the work.
            w = query_weights(q[:, at : at + rows], k[:, : at + rows], None, 0, rows, scale, 0.0)
            w.diagonal(at, dim1=-2, dim2=-1).zero_()
            total[..., : at + rows] += w.sum(-2)
            at += rows
        out.append(total.clone())
    return out


def retention(importance: torch.Tensor, block: int) -> torch.Tensor:
    """One layer's retention curve fp64 `[P]`: share of a block's importance in its best s + 1 tokens.

    `importance` `[H, n]`. Mean over heads, which choose tokens independently, and over all whole blocks but the last,
    which has few later queries. ValueError for fewer than two blocks.
    """
    blocks = importance.shape[1] // block - 1
    if blocks < 1:
        raise ValueError(f"retention needs two blocks of {block} tokens")
    rows = importance[:, : blocks * block].reshape(-1, block)
    return ops.retention_curves(rows).mean(0).cpu()


def layer_shares(curves: torch.Tensor, kept: float = KEPT) -> torch.Tensor:
    """XKV's Algorithm 1 on `curves` `[L, P]`: layer shares, fp32 `[L]` with sum 1, when `kept` of all tokens stay.

    Every layer gets at least one token.
    """
    layers, units = curves.shape
    total = max(layers, round(kept * layers * units))
    units_of = ops.greedy_allocation(curves, total, least=1)
    return torch.tensor(units_of, dtype=torch.float32) / total
