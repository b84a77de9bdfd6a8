"""Heavy hitters: cumulative attention (H2O, arXiv 2306.14048; MiniKV, arXiv 2411.18077)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvc_kernels import ops
from kvc_kernels.scores.reference import DECODE_STRIDE

from .base import Scorer


@dataclass(frozen=True)
class H2O(Scorer):
    """`s_i = sum_j sum_h A_hji` over all later queries j (KV-Compress' equation 9), as MiniKV selects, too.

    Both papers keep heavy hitters and the most recent tokens. The recent ones are the window, which stays uncompressed
    whole; with `recent` that share of every block, its latest tokens, comes before all heavy hitters as well.

    Assumed: heads of a group add up (the papers have one query head a KV head). Within a block earlier tokens have seen
    up to P - 1 more queries; the papers' sums do not correct for that, and neither does this. With `stride` s one query
    of a prompt in s is looked at and counts s times: collecting from all nearly doubles the time of a prefill. With
    `decode_stride` the same of the steps that generate.
    """

    name: ClassVar[str] = "h2o"
    recent: float = 0.0
    stride: int = 1
    decode_stride: int = DECODE_STRIDE

    def __post_init__(self) -> None:
        if not 0 <= self.recent <= 1:
            raise ValueError("recent is a share from 0 to 1")
        super().__post_init__()

    @property
    def observe(self) -> ops.Observe:
        return ops.Observe(reduce="sum", stride=self.stride, decode_stride=self.decode_stride)

    def score(self, evidence) -> torch.Tensor:
        scores = evidence.received()
        p = scores.shape[-1]
        if latest := round(self.recent * p):
            # Sums of probabilities over queries are finite: the later of the recent tokens come first among them.
            scores[..., p - latest :] = 1e30 * torch.arange(1, latest + 1, device=scores.device)
        return scores
