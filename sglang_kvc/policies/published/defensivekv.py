"""DefensiveKV (arXiv 2510.13334): a token's score is the largest attention that any query pays to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvc_kernels import ops
from kvc_kernels.ops import DECODE_STRIDE

from ..scorers.base import Scorer, check_pool


@dataclass(frozen=True)
class DefensiveKV(Scorer):
    """`s_i = max(m_i, mean_t m_t) |v_i|` with `m_i = pool_{|t-i| <= pool/2} max_{j > L-w} max_h A_hjt`.

    The worst case over the last w queries and the query heads of a KV head takes the place of their mean, and no token
    is worth less than the mean worst case, which corrects for the small number of queries. Without
    `values`, the norm of the value does not count. w = 32 and mean pooling over 5 tokens are the settings of the
    paper's code.

    Assumed: the mean and pooling see the block alone, and pooling follows the maximum, where the paper pools every
    query's attention before. The norm is that of the value; the paper takes the value times the output matrix, and
    keeps the tokens with 90 % of the attention whatever their norm. With `window` 0 all queries count. One decode step
    in `decode_stride` counts, too. The layer budgets of Layer-DefensiveKV are the competition of all heads (`share`
    `global`).
    """

    name: ClassVar[str] = "defensivekv"
    sums: ClassVar[bool] = False
    window: int = 32
    pool: int = 5
    values: bool = True
    decode_stride: int = DECODE_STRIDE

    def __post_init__(self) -> None:
        check_pool(self.pool)
        super().__post_init__()

    @property
    def sampling(self) -> ops.ScoreSampling:
        return ops.ScoreSampling(self.window or None, "worst", decode_stride=self.decode_stride)

    def score(self, evidence) -> torch.Tensor:
        worst = ops.pool_scores(evidence.attention_scores(), self.pool, "mean")
        worst = torch.maximum(worst, worst.mean(-1, keepdim=True))
        if not self.values:
            return worst
        norms = (evidence.rows(i)[1].norm(dim=-1) for i in range(evidence.layout.layers))
        return worst * torch.stack(list(norms), 1)
