"""Gates: small networks, one for each KV head, that rate a token by its key and value."""

from __future__ import annotations

import torch


def gate_scores(
    rows: torch.Tensor,
    weights: torch.Tensor,
    biases: torch.Tensor,
    out: torch.Tensor,
    out_bias: torch.Tensor,
) -> torch.Tensor:
    """`out . relu(weights x + biases) + out_bias` of each token x, fp32 `[n, H, P]`.

    `rows` fp32 `[n, H, P, E]`, `weights` `[H, F, E]`, `biases` `[H, F]`, `out` `[H, F]`, `out_bias` `[H]`; F hidden
    units a head.
    """
    hidden = (rows @ weights.transpose(-1, -2) + biases.unsqueeze(1)).relu_()
    return (hidden @ out.unsqueeze(-1)).squeeze(-1) + out_bias.unsqueeze(-1)
