"""CAKE's eviction score (arXiv 2503.12491): tokens whose attention is large, or changes from query to query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvc_kernels import ops

from .base import check_pool
from .dapq import DapQ


@dataclass(frozen=True)
class Cake(DapQ):
    """`s_i = pool_{|t-i| <= pool/2} mean_h (mean_m A_hmt + gamma Var_m A_hmt)` over M queries m.

    gamma = 200 and mean pooling over 5 tokens are the settings of the paper's code.

    Assumed: the queries are DapQ's pseudo queries, where the paper takes the last 32 of the prompt. A variance over a
    prompt's queries needs a second sum for each stored token, and a page stores one. Pooling sees the block alone.
    """

    name: ClassVar[str] = "cake"
    gamma: float = 200.0
    pool: int = 5

    def __post_init__(self) -> None:
        check_pool(self.pool)
        if not self.gamma >= 0:  # nor is nan
            raise ValueError("gamma is 0 or more")
        super().__post_init__()

    def score_layer(self, evidence, layer: int) -> torch.Tensor:
        paid = self.attention(evidence, layer)
        scores = paid.mean(3) + self.gamma * paid.var(3, correction=0)
        return ops.pool_scores(scores.mean(2), self.pool, "mean")
