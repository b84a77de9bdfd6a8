"""Attention scores of a text's tokens, layer by layer."""

from __future__ import annotations

import torch

from kvc_kernels.ops import MAX_ELEMENTS, query_weights


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
            # Later tokens are masked; skipping them saves half of the work.
            w = query_weights(q[:, at : at + rows], k[:, : at + rows], None, 0, rows, scale, 0.0)
            w.diagonal(at, dim1=-2, dim2=-1).zero_()
            total[..., : at + rows] += w.sum(-2)
            at += rows
        out.append(total.clone())
    return out
