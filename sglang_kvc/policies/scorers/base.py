"""What a scorer is: how important is a token for a head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from kvc_kernels import ops

if TYPE_CHECKING:
    from ..base import Evidence


@dataclass(frozen=True)
class Scorer:
    """Base of all scorers. A subclass is one file beside this one and one line in `SCORERS`; its fields are parameters
    that a user may set (`--kvc-scorer snapkv:window=64,pool=5`).

    It declares what it needs, and nothing else is collected: `observe` (attention, then the scope is `sequence`) and
    `needs` (tensors of the calibration file). `score` sees all due blocks, layers and heads at once.

    What later scorers want is carried by that: per-layer statistics (CAKE) are reductions of the sums, which a share
    may read, too; worst cases over queries (DefensiveKV) and recurrence (LazyEviction: last time and longest interval
    in one word) are other rules of `Observe` for the number that travels with a token, with `Evidence.lengths` as the
    clock; chosen heads (CompressKV) and pseudo queries (DapQ) are tensors of the calibration file.
    """

    name: ClassVar[str]

    @property
    def observe(self) -> ops.Observe | None:
        """Which attention is collected while queries are alive; None when keys, values and positions suffice."""
        return None

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the tensors that the calibration file must hold."""
        return ()

    def score(self, evidence: Evidence) -> torch.Tensor:
        """fp32 `[n, L, H, P]`, higher is kept. Without `observe`: a function of each block's rows and positions."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        _ = self.observe  # refuses parameters that make no sense


@dataclass(frozen=True)
class RowScorer(Scorer):
    """A scorer that looks at the rows of one layer at a time, so that no more than those are held in fp32."""

    def score(self, evidence: Evidence) -> torch.Tensor:
        return torch.stack([self.score_layer(evidence, i) for i in range(evidence.layout.layers)], dim=1)

    def score_layer(self, evidence: Evidence, layer: int) -> torch.Tensor:
        """fp32 `[n, H, P]`."""
        raise NotImplementedError


def check_pool(size: int, kind: str = "max") -> None:
    """ValueError for a pooling that does not exist."""
    ops.pool_scores(torch.zeros(1, 1), size, kind)
