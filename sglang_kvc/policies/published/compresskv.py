"""CompressKV (arXiv 2508.02401): retrieval heads decide which tokens a layer keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvc_kernels import ops

from ..scorers.base import Scorer, check_pool


@dataclass(frozen=True)
class CompressKV(Scorer):
    """`s_i = sum_{h in C_l} pool_{|t-i| <= pool/2} sum_{j > L-w} A_hjt`, the same for all heads of layer l.

    C_l are the `heads` KV heads of the layer with the largest `head_retrieval` in the calibration file: in a repeated
    text, their attention to the tokens that followed the query's token the first time. w = 8 and mean pooling over 5
    tokens are the settings of the paper's code.

    Assumed: KV heads are chosen, with all query heads of their groups, where the paper chooses 4 query heads a layer.
    Retrieval is measured on repeated text, where the paper sums the attention of generated answers to the whole of a
    needle. The paper also divides the budget among layers, by the error of their outputs; here `share` divides it. The
    query of each sampled decode step counts, too.
    """

    name: ClassVar[str] = "compresskv"
    heads: int = 1
    window: int = 8
    pool: int = 5

    def __post_init__(self) -> None:
        check_pool(self.pool)
        if self.heads < 1:
            raise ValueError("heads is 1 or more")
        super().__post_init__()

    @property
    def sampling(self) -> ops.ScoreSampling:
        return ops.ScoreSampling(self.window, "sum")

    @property
    def needs(self) -> tuple[str, ...]:
        return ("head_retrieval",)

    def score(self, evidence) -> torch.Tensor:
        scores = ops.pool_scores(evidence.attention_scores(), self.pool, "mean")
        retrieval = evidence.calibration["head_retrieval"]  # [L, H]
        chosen = retrieval.topk(min(self.heads, retrieval.shape[1]), dim=-1).indices
        is_chosen = torch.zeros_like(retrieval).scatter_(1, chosen, 1.0)
        return (scores * is_chosen.unsqueeze(-1)).sum(2, keepdim=True).expand_as(scores)
