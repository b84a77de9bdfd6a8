"""KeyDiff (arXiv 2504.15364): a key that differs from the mean key matters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvc_kernels import ops

from .base import RowScorer


@dataclass(frozen=True)
class KeyDiff(RowScorer):
    """`s_i = -cos(k_i, mean_j k_j / |k_j|)`; the anchor is the mean of the normalized keys.

    Assumed: the anchor is the block's, where the paper takes all cached keys, so that the score depends on the block's
    rows alone. Keys have their rotary embedding, as in the paper.
    """

    name: ClassVar[str] = "keydiff"

    def score(self, evidence) -> torch.Tensor:
        if evidence.from_format == 0:
            return ops.keydiff_blocks(evidence.store, evidence.blocks)
        return super().score(evidence)

    def score_layer(self, evidence, layer: int) -> torch.Tensor:
        return ops.keydiff(evidence.rows(layer)[0])
