"""Expected attention (arXiv 2510.00636): what queries of this model are likely to attend to, whatever they ask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvc_kernels import ops

from .base import RowScorer


@dataclass(frozen=True)
class ExpectedAttention(RowScorer):
    """`s_i = (a_i P + epsilon) |v_i|`, `a_i ~ exp(mu.k_i / sqrt(D) + k_i^T S k_i / 2D)`, for queries of N(mu, S).

    mu `[L, Hq, D]` and S `[L, Hq, D, D]` come from the calibration file (`query_mean`, `query_covariance`), so no query
    of a request enters. With `rotary_frequencies` in the file they are those of queries before the rotary embedding,
    rotated to the mean over the `horizon` positions behind the block, as the paper does for the positions to come;
    without, those of rotated queries, taken as they are.

    Assumed: a_i is normalised over the block of P tokens, where the paper takes all n of the prompt. So epsilon is in
    units of a token's mean attention: the paper's 0.01 beside shares of 1 / n is 0.01 n there, 20 for 2048 tokens (0.01
    of a block would be 1.28, with which SmolLM2 loses a third of the needles that it finds with 20). The norm is the
    value's, where the paper writes the value's through the output matrix; query heads of a group are averaged; logits
    are scaled by 1 / sqrt(D).
    """

    name: ClassVar[str] = "expected-attention"
    epsilon: float = 20.0
    covariance: bool = True
    horizon: int = 512

    def __post_init__(self) -> None:
        if not self.epsilon >= 0 or self.horizon < 1:  # nor is nan
            raise ValueError("epsilon is 0 or more, and the horizon 1 position or more")
        super().__post_init__()

    @property
    def needs(self) -> tuple[str, ...]:
        return ("query_mean", "query_covariance") if self.covariance else ("query_mean",)

    def score_layer(self, evidence, layer: int) -> torch.Tensor:
        stats = evidence.calibration
        keys, values = evidence.rows(layer)
        if "rotary_frequencies" in stats:
            ends = evidence.starts + evidence.layout.block_tokens
            keys = ops.future_keys(keys, ends, stats["rotary_frequencies"], self.horizon)
        spread = stats["query_covariance"][layer] if self.covariance else None
        layout = evidence.layout
        scale, epsilon = layout.head_dim**-0.5, self.epsilon / layout.block_tokens
        return ops.expected_attention(keys, values, stats["query_mean"][layer], spread, epsilon, scale)
