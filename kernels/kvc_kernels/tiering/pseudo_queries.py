"""Attention of pseudo queries: a model's own queries, turned to positions after a block, over the block's tokens."""

from __future__ import annotations

import torch


def rotated(x: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """fp32 `[..., D]` with the rotary embedding of `positions` `[...]`, both broadcast.

    `frequencies` fp32 `[R/2]`: radians per position of the pairs (j, j + R/2) of the first R features. Negative
    positions undo the rotation.
    """
    half = frequencies.numel()
    # fp64: in fp32 the angle of a late position loses its fraction
    angle = positions[..., None].double() * frequencies.double()
    cos, sin = angle.cos().float(), angle.sin().float()
    a, b, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    turned = (a * cos - b * sin, b * cos + a * sin)
    return torch.cat((*turned, rest.expand(*turned[0].shape[:-1], -1)), dim=-1)


def pseudo_attention(
    keys: torch.Tensor,
    ends: torch.Tensor,
    queries: torch.Tensor,
    frequencies: torch.Tensor,
    horizon: int,
    scale: float,
) -> torch.Tensor:
    """Probabilities fp32 `[n, H, G, M, P]` of M pseudo queries of each query head over a block's P tokens.

    `keys` fp32 `[n, H, P, D]` with rotary embedding; `queries` fp32 `[Hq, M, D]` without. Query m is turned to position
    ends[n] + m * horizon / M, so that the queries are evenly spaced over the `horizon` positions after the block.
    """
    heads, count = keys.shape[1], queries.shape[1]
    at = ends[:, None, None] + torch.arange(count, device=ends.device) * horizon // count  # [n, 1, M]
    turned = rotated(queries, at, frequencies)  # [n, Hq, M, D]
    logits = turned.unflatten(1, (heads, -1)).flatten(2, 3) @ keys.transpose(-1, -2) * scale
    return logits.softmax(-1).unflatten(2, (-1, count))
