"""LeanKV's attention score (DiffKV, arXiv 2412.03131, section 4) as a scorer for page quotas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvc_kernels import ops
from kvc_kernels.ops import DECODE_STRIDE

from ..scorers.base import Scorer


@dataclass(frozen=True)
class MeanAttention(Scorer):
    """`s_i = 1/|J| sum_{j in J} max_h A_hji` over the queries j after token i, h the query heads of a KV head.

    With `window` w only the last w queries of a prompt are in J; 0 means all. With `stride` s, J has one prompt
    query in s; with `decode_stride` s, one decode step in s. Assumed: the maximum is taken over heads of a forward's
    sum, not per query; for a decode step, which has one query, both are equal.
    """

    name: ClassVar[str] = "mean-attention"
    sums: ClassVar[bool] = False
    window: int = 0
    stride: int = 1
    decode_stride: int = DECODE_STRIDE

    @property
    def sampling(self) -> ops.ScoreSampling:
        return ops.ScoreSampling(self.window or None, stride=self.stride, decode_stride=self.decode_stride)

    def score(self, evidence) -> torch.Tensor:
        return evidence.mean_attention_scores()
