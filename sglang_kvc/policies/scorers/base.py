"""`Scorer`: the importance of each token for each head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from kvc_kernels import ops

from ..parse import Part

if TYPE_CHECKING:
    from ..base import Evidence


@dataclass(frozen=True)
class Scorer(Part):
    """Base of all scorers. A subclass is one file in this folder and one line in `SCORERS`; its fields are settings
    that a user may give (`--kvc-scorer snapkv:window=64,pool=5`).

    A scorer declares its inputs, and nothing else is collected: `sampling` (attention scores; the scope is then
    `sequence`) and `needs` (tensors of the calibration file). `score` sees all due blocks, layers and heads at once.
    """

    # Whether scores grow with the number of counted queries.
    sums: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _ = self.sampling  # refuses invalid settings

    @property
    def sampling(self) -> ops.ScoreSampling | None:
        """Attention scores to collect; None when keys, values and positions suffice."""
        return None

    def score(self, evidence: Evidence) -> torch.Tensor:
        """fp32 `[n, L, H, P]`; higher scores are kept. Without `sampling`, a function of each block's rows and
        positions."""
        raise NotImplementedError


@dataclass(frozen=True)
class RowScorer(Scorer):
    """A scorer that reads the rows of one layer at a time, so that no more than one layer is held in fp32."""

    def score(self, evidence: Evidence) -> torch.Tensor:
        return torch.stack([self.score_layer(evidence, i) for i in range(evidence.layout.layers)], dim=1)

    def score_layer(self, evidence: Evidence, layer: int) -> torch.Tensor:
        """fp32 `[n, H, P]`."""
        raise NotImplementedError


def check_pool(size: int, kind: str = "max") -> None:
    """ValueError for an unknown kind of pooling."""
    ops.pool_scores(torch.zeros(1, 1), size, kind)
