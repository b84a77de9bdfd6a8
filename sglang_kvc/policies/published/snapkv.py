"""SnapKV (arXiv 2404.14469): attention scores from the end of the prompt, pooled over neighbors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvc_kernels import ops

from ..scorers.base import Scorer, check_pool


@dataclass(frozen=True)
class SnapKV(Scorer):
    """`s_i = pool_{|t-i| <= pool/2} sum_{j > L-w} sum_h A_hjt` over the last w queries (KV-Compress, equations 7, 8).

    `window` w = 32 and max pooling over 7 tokens are the settings of the paper's LongBench runs; `kind` may be "mean".

    Assumed: heads of a group add up (equation 10). The query of each sampled decode step counts, too. Pooling sees the
    block alone. The last w tokens, which the paper always keeps, lie in the uncompressed window.
    """

    name: ClassVar[str] = "snapkv"
    window: int = 32
    pool: int = 7
    kind: str = "max"

    def __post_init__(self) -> None:
        check_pool(self.pool, self.kind)
        super().__post_init__()

    @property
    def sampling(self) -> ops.ScoreSampling:
        return ops.ScoreSampling(self.window, "sum")

    def score(self, evidence) -> torch.Tensor:
        return ops.pool_scores(evidence.attention_scores(), self.pool, self.kind)
