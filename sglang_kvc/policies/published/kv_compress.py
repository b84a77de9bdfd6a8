"""KV-Compress (arXiv 2410.00161, sections 4.1 and 4.3): squared attention scores of a window or of all queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvc_kernels import ops
from kvc_kernels.ops import DECODE_STRIDE

from ..scorers.base import Scorer, check_pool


@dataclass(frozen=True)
class KvCompress(Scorer):
    """KVC-w: `s_i = max_{|t-i| <= pool/2} sum_{j > L-w} sum_h A_hjt^2`, w = 8, pool = 7 (equations 8 and 10, squared).

    `power` 1 gives the plain sums that the paper compares with. Decode steps add their squares (equation 20). With
    `stride` s one prompt query in s is read and counts s times; `decode_stride` does the same for decode steps.

    Assumed: pooling sees the block alone, and includes what decode steps added; the paper pools the prompt's sums
    only.
    """

    name: ClassVar[str] = "kv-compress"
    window: int = 8
    skip: int = 0
    power: int = 2
    pool: int = 7
    stride: int = 1
    decode_stride: int = DECODE_STRIDE

    def __post_init__(self) -> None:
        check_pool(self.pool)
        super().__post_init__()

    @property
    def sampling(self) -> ops.ScoreSampling:
        return ops.ScoreSampling(self.window or None, "sum", self.power, self.skip, self.stride, self.decode_stride)

    def score(self, evidence) -> torch.Tensor:
        return ops.pool_scores(evidence.attention_scores(), self.pool)


@dataclass(frozen=True)
class KvCompressFull(KvCompress):
    """KVC-full: `s_i = sum_{j >= i+v} sum_h A_hji^2` with v = 10 (equation 19): near queries predict far ones badly.

    Assumed: no pooling, which the paper names for KVC-w only. Queries near a packed token are not skipped; with a
    window of at least v tokens no query of one request is near a packed token.
    """

    name: ClassVar[str] = "kv-compress-full"
    window: int = 0
    skip: int = 10
    pool: int = 1
