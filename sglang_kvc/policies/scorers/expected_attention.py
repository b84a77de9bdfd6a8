"""Expected attention (arXiv 2510.00636): attention scores expected from this model's usual queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvc_kernels import ops

from .base import RowScorer


@dataclass(frozen=True)
class ExpectedAttention(RowScorer):
    """`s_i = (a_i P + epsilon) |v_i|`, `a_i ~ exp(mu.k_i / sqrt(D) + k_i^T S k_i / 2D)`, for queries of N(mu, S).

    mu `[L, Hq, D]` and S `[L, Hq, D, D]` come from the calibration file (`query_mean`, `query_covariance`), so the
    scores depend on no query of a request. If the file has `rotary_frequencies`, mu and S are those of queries before
    the rotary embedding, and are rotated to the mean over the `horizon` positions after the block, as in the paper.
    Otherwise they are those of rotated queries and are used unchanged.

    Assumed: a_i is normalized over the block's P tokens, where the paper normalizes over the prompt's n. So epsilon is
    in units of a token's mean attention: the paper's 0.01 corresponds to 0.01 n, which is 20 for 2048 tokens. (1.28,
    which is 0.01 P, costs SmolLM2 a third of the needles that it finds with 20.) The norm is that of the value, where
    the paper takes the value times the output matrix. Query heads of a group are averaged. Logits are scaled by
    1 / sqrt(D).
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
