"""`Share`: how a block's pages are allocated among its layers and heads. `SHARES` lists all.

The block format gives the number of pages, which the CPU knows before any score. A share says who competes for them:
all heads of all layers, the heads of a layer, or nobody (each head keeps its best tokens in pages given in advance).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvc_kernels import ops

from ..calibration.tensors import Calibration
from .parse import Part


@dataclass(frozen=True)
class Share(Part):
    """Base of all shares. A subclass is a class here and a name in `SHARES`."""

    name: ClassVar[str]

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the tensors that the calibration file must hold."""
        return ()

    def plan(
        self, scores: torch.Tensor, pages: int, page_tokens: int, floor: int, calibration: Calibration | None
    ) -> torch.Tensor:
        """Tiers int8 `[n, L, H, P]`, 2 (kept) or 0, for `pages` pages of `page_tokens` tokens.

        Every head keeps at least `floor` pages. Ties go to the lower position, head and layer. `scores` is fp32
        `[n, L, H, P]`.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Global(Share):
    """KV-Compress (arXiv 2410.00161, section 4.2): all heads of all layers compete."""

    name: ClassVar[str] = "global"

    def plan(self, scores, pages, page_tokens, floor, calibration) -> torch.Tensor:
        return ops.quota(scores, pages, page_tokens, floor)


@dataclass(frozen=True)
class ByLayer(Share):
    """Layers get pages by weight, and heads of a layer get equal pages.

    With `compete`, the heads of a layer compete instead, and each keeps at least the share `floor` of an even split
    (AdaKV, arXiv 2407.11550, Algorithm 1 and its safeguard).
    """

    compete: bool = False
    floor: float = 0.2

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= 1:
            raise ValueError("floor is a share from 0 to 1")

    def weights(self, layers: int, average: float, most: int, calibration: Calibration | None) -> Sequence[float]:
        """A weight for each layer, when layers have `average` pages on average and can use at most `most`."""
        return [1.0] * layers

    def plan(self, scores, pages, page_tokens, floor, calibration) -> torch.Tensor:
        _, layers, heads, tokens = scores.shape
        per_head = -(-tokens // page_tokens)
        weights = tuple(self.weights(layers, pages / layers, heads * per_head, calibration))
        quotas, floors = _quotas(weights, pages, heads, per_head, floor, self.compete, self.floor)
        return ops.quota(scores, quotas, page_tokens, floors)


@functools.lru_cache(maxsize=64)
def _quotas(
    weights: tuple[float, ...], pages: int, heads: int, per_head: int, floor: int, compete: bool, floor_share: float
) -> tuple[list[int], list[int]]:
    """Pages and floors, per layer if heads compete, else per head."""
    by_layer = ops.apportion(weights, pages, heads * floor, heads * per_head)
    if compete:
        return by_layer, [max(floor, int(floor_share * p / heads)) for p in by_layer]
    by_head = [p for layer in by_layer for p in ops.spread(layer, heads)]
    return by_head, [floor] * len(by_head)


@dataclass(frozen=True)
class Uniform(ByLayer):
    """Equal pages for all layers and heads, to within one page."""

    name: ClassVar[str] = "uniform"


@dataclass(frozen=True)
class Ada(ByLayer):
    """AdaKV: equal pages for all layers; the heads of a layer compete.

    Assumed: heads compete in units of pages, as in KV-Compress, and a page is worth its best token.
    """

    name: ClassVar[str] = "ada"
    compete: bool = True


@dataclass(frozen=True)
class Pyramid(ByLayer):
    """PyramidKV (arXiv 2406.02069, section 4.2): pages fall linearly from the first layer to the last.

    The last layer gets 1 / beta of the average, and the first exceeds the average by what the last lacks. `beta` 20 is
    the default of the paper's code; MiniKV (appendix H) takes 7. Assumed: PyramidKV's direction also for MiniKV, whose
    appendix H and section 3.1.3 contradict each other.
    """

    name: ClassVar[str] = "pyramid"
    beta: float = 20.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.beta >= 1:  # nor is nan
            raise ValueError("beta is 1 or more")

    def weights(self, layers, average, most, calibration) -> Sequence[float]:
        return ops.pyramid(layers, average, most, self.beta)


@dataclass(frozen=True)
class Xkv(ByLayer):
    """XKV (section IV): each layer's share as measured on samples of a workload (`layer_shares`).

    Assumed: the heads of a layer split its pages evenly, because the paper keeps the same tokens for all of them.
    """

    name: ClassVar[str] = "xkv"

    @property
    def needs(self) -> tuple[str, ...]:
        return ("layer_shares",)

    def weights(self, layers, average, most, calibration) -> Sequence[float]:
        return calibration["layer_shares"].tolist()


SHARES: dict[str, type[Share]] = {s.name: s for s in (Global, Uniform, Ada, Pyramid, Xkv)}
