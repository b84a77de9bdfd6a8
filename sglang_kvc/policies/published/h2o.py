"""Heavy hitters: cumulative attention scores (H2O, arXiv 2306.14048; MiniKV, arXiv 2411.18077)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvc_kernels import ops
from kvc_kernels.ops import DECODE_STRIDE

from ..scorers.base import Scorer


@dataclass(frozen=True)
class H2O(Scorer):
    """`s_i = sum_j sum_h A_hji` over all later queries j (KV-Compress, equation 9). MiniKV selects by the same sum.

    Both papers keep heavy hitters and the most recent tokens. Here the recent tokens are the window, which stays
    uncompressed. With `recent`, that share of every block, its latest tokens, also ranks before all heavy hitters.

    Assumed: heads of a group add up (the papers have one query head per KV head). Within a block earlier tokens have
    seen up to P - 1 more queries; neither the papers' sums nor these correct for that. With `stride` s one prompt query
    in s is read and counts s times, because reading all of them adds about half the time of a 16K-token prefill.
    `decode_stride` does the same for decode steps.
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
    def sampling(self) -> ops.ScoreSampling:
        return ops.ScoreSampling(reduce="sum", stride=self.stride, decode_stride=self.decode_stride)

    def score(self, evidence) -> torch.Tensor:
        scores = evidence.attention_scores()
        p = scores.shape[-1]
        if latest := round(self.recent * p):
            # Above every sum of probabilities, and higher for later tokens.
            scores[..., p - latest :] = 1e30 * torch.arange(1, latest + 1, device=scores.device)
        return scores
