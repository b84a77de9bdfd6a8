"""Token importance from rows and positions alone: key difference, expected attention, hashes, pooling.

Every function uses one block only, so scores of policies with scope `block` are a function of the block's rows. P is
the number of tokens of a block, always the last dimension of a score.
"""

from __future__ import annotations

import torch
from torch.nn.functional import avg_pool1d, max_pool1d, normalize, pad

from ..pages.dense import load_dense
from ..store import PageStore

POOLS = ("max", "mean")


def keydiff(keys: torch.Tensor) -> torch.Tensor:
    """`-cos(k_i, mean_j k_j / |k_j|)` over the block: `keys` fp32 `[..., P, D]` -> fp32 `[..., P]`."""
    unit = normalize(keys, dim=-1)
    center = normalize(unit.mean(dim=-2, keepdim=True), dim=-1)
    return -(unit * center).sum(-1)


def keydiff_blocks(store: PageStore, blocks: torch.Tensor) -> torch.Tensor:
    """`keydiff` of uncompressed `blocks[n]`, of their stored keys: fp32 `[n, L, H, P]`."""
    keys = (load_dense(store, layer, blocks, 0)[0] for layer in range(store.layout.layers))
    return torch.stack([keydiff(x) for x in keys], dim=1)


def pool_scores(scores: torch.Tensor, size: int, kind: str = "max") -> torch.Tensor:
    """Maximum ("max") or mean score over the `size` tokens around each token, within its block.

    `scores` fp32 `[..., P]`; `size` odd, 1 changes nothing. ValueError for an even size or another kind.
    """
    if size % 2 == 0 or size < 1 or kind not in POOLS:
        raise ValueError(f"scores are pooled by max or mean over an odd number of tokens, not by {kind} over {size}")
    if size == 1:
        return scores
    flat = scores.flatten(0, -2)
    if kind == "max":
        pooled = max_pool1d(flat, size, stride=1, padding=size // 2)
    else:
        pooled = avg_pool1d(flat.unsqueeze(1), size, stride=1, padding=size // 2, count_include_pad=False).squeeze(1)
    return pooled.view(scores.shape)


def carry_scores(scores: torch.Tensor, reach: int, share: float) -> torch.Tensor:
    """Each token's score, or `share` times the best score of the `reach` tokens before it if that is more.

    `scores` fp32 `[H, S]`, at least 0; 0 <= `share` <= 1.
    """
    before = max_pool1d(pad(scores, (reach, 0)), reach + 1, stride=1)
    return torch.maximum(scores, before.mul_(share))


def hashed_scores(positions: torch.Tensor, layers: int, heads: int) -> torch.Tensor:
    """Hash of (position, layer, head) as fp32 `[n, L, H, P]` in [0, 1), for `positions` `[n, P]`.

    The finalizer of MurmurHash3 (32 bits): equal on every device, without generator or state.
    """
    cell = torch.arange(layers * heads, device=positions.device).view(1, layers, heads, 1)
    x = (positions.long()[:, None, None, :] * 0x9E3779B1 + cell * 0x85EBCA77) & 0xFFFFFFFF
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return (x >> 8).float() / (1 << 24)


def future_keys(keys: torch.Tensor, ends: torch.Tensor, frequencies: torch.Tensor, horizon: int) -> torch.Tensor:
    """Keys averaged over the rotations of future queries: mean over positions t of R(t)^T k, same shape as `keys`.

    `keys` fp32 `[n, H, P, D]` with rotary embedding; t runs over ends[n] .. ends[n] + horizon - 1, the positions of the
    block's next readers; `frequencies` fp32 `[R/2]`, radians per position of the pairs (j, j + R/2) of the first R
    features. With the result k', a query's mean mu and covariance S before rotation give (R mu) . k = mu . k' and k^T
    (R S R^T) k = k'^T S k' for the mean rotation R, as Expected Attention averages it.
    """
    half = frequencies.numel()
    t = ends[:, None] + torch.arange(horizon, device=ends.device)
    # fp64: in fp32 the angle of a late position loses its fraction
    angle = t[..., None].double() * frequencies.double()
    cos, sin = (f(angle).mean(1).float()[:, None, None] for f in (torch.cos, torch.sin))  # [n, 1, 1, R/2]
    a, b, rest = keys.split((half, half, keys.shape[-1] - 2 * half), dim=-1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin, rest), dim=-1)


def expected_attention(
    keys: torch.Tensor,
    values: torch.Tensor,
    mean: torch.Tensor,
    covariance: torch.Tensor | None,
    epsilon: float,
    scale: float,
) -> torch.Tensor:
    """`(a_i + epsilon) |v_i|` fp32 `[n, H, P]`, with a the attention of a query drawn from N(mean, covariance).

    `keys`, `values` fp32 `[n, H, P, D]`; `mean` `[Hq, D]`, `covariance` `[Hq, D, D]`, Hq = H * G, or None for the mean
    alone. The expectation of exp(scale q.k_i) is exp(scale mu.k_i + scale^2/2 k_i^T S k_i). a_i is its share among the
    block's tokens, averaged over the G query heads.
    """
    heads = keys.shape[1]
    mu = mean.view(heads, -1, mean.shape[-1])
    logits = scale * torch.einsum("nhpd,hgd->nhgp", keys, mu)
    if covariance is not None:
        spread = covariance.view(*mu.shape, -1)
        for g in range(mu.shape[1]):  # one query head at a time bounds temporaries to [n, H, P, D]
            quadratic = (keys @ spread[:, g] * keys).sum(-1)
            logits[:, :, g] += 0.5 * scale * scale * quadratic
    return (logits.softmax(-1).mean(2) + epsilon) * values.norm(dim=-1)
