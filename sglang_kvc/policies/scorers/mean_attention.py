"""LeanKV's significance (DiffKV, arXiv 2412.03131, section 4) as a scorer for quotas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvc_kernels import ops
from kvc_kernels.scores.reference import DECODE_STRIDE

from .base import Scorer


@dataclass(frozen=True)
class MeanAttention(Scorer):
    """`s_i = 1/|J| sum_{j in J} max_h A_hji` over the queries j behind token i, h the query heads of a KV head.

    With `window` w only the last w queries of each forward are in J; 0 means all. Assumed: the maximum is taken of a
    forward's sum over queries, not for each query, which is the same for one query (decode). With `stride` s one query
    of a prompt in s is in J, with `decode_stride` one decode step in so many.
    """

    name: ClassVar[str] = "mean-attention"
    window: int = 0
    stride: int = 1
    decode_stride: int = DECODE_STRIDE

    @property
    def observe(self) -> ops.Observe:
        return ops.Observe(self.window or None, stride=self.stride, decode_stride=self.decode_stride)

    def score(self, evidence) -> torch.Tensor:
        return evidence.significance()
