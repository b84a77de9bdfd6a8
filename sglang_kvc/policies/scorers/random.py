"""Random scores: the control for every other scorer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvc_kernels import ops

from .base import Scorer


@dataclass(frozen=True)
class Random(Scorer):
    """A hash of (position, layer, head), the same in every run and on every device.

    Heads are numbered within a rank, so all tensor-parallel ranks draw the same scores.
    """

    name: ClassVar[str] = "random"

    def score(self, evidence) -> torch.Tensor:
        return ops.hashed_scores(evidence.positions(), evidence.layout.layers, evidence.layout.heads)
