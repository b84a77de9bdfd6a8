"""DapQ: attention scores of pseudo queries at the positions where an answer will be generated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvc_kernels import ops

from .base import RowScorer


@dataclass(frozen=True)
class DapQ(RowScorer):
    """`s_i = sum_m sum_h A_hmi` over M pseudo queries at the `horizon` positions after the block, and the query heads
    of a KV head. By the paper (arXiv 2603.11564), their positions matter more than their content.

    The pseudo queries are queries of the calibration text before their rotary embedding (`query_samples`), turned to
    their new positions (`rotary_frequencies`). The scores depend on no query of a request.

    Assumed: the window of pseudo queries follows the block, where the paper's follows the whole prompt, and A is
    normalized over the block's tokens. The paper runs a window of arbitrary tokens through the model to obtain its
    queries; here their content is that of the calibration text. No pooling.
    """

    name: ClassVar[str] = "dapq"
    horizon: int = 128

    def __post_init__(self) -> None:
        if self.horizon < 1:
            raise ValueError("the horizon is 1 position or more")
        super().__post_init__()

    @property
    def needs(self) -> tuple[str, ...]:
        return ("query_samples", "rotary_frequencies")

    def attention(self, evidence, layer: int) -> torch.Tensor:
        """Probabilities of the pseudo queries, fp32 `[n, H, G, M, P]`."""
        stats, layout = evidence.calibration, evidence.layout
        ends = evidence.starts + layout.block_tokens
        queries, frequencies = stats["query_samples"][layer], stats["rotary_frequencies"]
        scale = layout.head_dim**-0.5
        return ops.pseudo_attention(evidence.rows(layer)[0], ends, queries, frequencies, self.horizon, scale)

    def score_layer(self, evidence, layer: int) -> torch.Tensor:
        return self.attention(evidence, layer).sum((2, 3))
