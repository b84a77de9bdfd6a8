"""The control: what any choice of the same size costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvc_kernels import ops

from .base import Scorer


@dataclass(frozen=True)
class Random(Scorer):
    """A hash of (position, layer, head): looks random, and is the same in every run and on every device.

    Heads count from the first of this rank, so tensor-parallel ranks draw alike.
    """

    name: ClassVar[str] = "random"

    def score(self, evidence) -> torch.Tensor:
        return ops.hashed_scores(evidence.positions(), evidence.layout.layers, evidence.layout.heads)
