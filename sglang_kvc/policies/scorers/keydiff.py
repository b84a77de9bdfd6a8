"""KeyDiff (arXiv 2504.15364): a key unlike the others matters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvc_kernels import ops

from .base import RowScorer


@dataclass(frozen=True)
class KeyDiff(RowScorer):
    """`s_i = -cos(k_i, mean_j k_j / |k_j|)`, the anchor being the mean of the normalised keys.

    Assumed: the anchor is that of the block, where the paper takes all cached keys; so the score is a function of the
    block's own rows. Keys are those stored, with their rotary embedding, as in the paper.
    """

    name: ClassVar[str] = "keydiff"

    def score(self, evidence) -> torch.Tensor:
        if evidence.store.device.type == "cuda" and evidence.from_rung == 0:
            from kvc_kernels.tiering.keydiff_kernel import keydiff_blocks

            return keydiff_blocks(evidence.store, evidence.blocks)
        return super().score(evidence)

    def score_layer(self, evidence, layer: int) -> torch.Tensor:
        return ops.keydiff(evidence.rows(layer)[0])
