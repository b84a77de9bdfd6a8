"""How a block's pages are shared out among its layers and heads; the list of ways.

The number of pages is the rung's, known to the CPU before any score is. A way says between whom scores decide: all
heads of all layers, the heads of a layer, or nobody (each head keeps its best tokens in pages given in advance).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvc_kernels import ops

from ..calibration.tensors import Calibration


@dataclass(frozen=True)
class Share:
    """Base. A subclass is a class here and a line in `SHARES`; it says the weights of the layers, or plans itself."""

    name: ClassVar[str]

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the tensors that the calibration file must hold."""
        return ()

    def plan(
        self, scores: torch.Tensor, pages: int, page_tokens: int, floor: int, calibration: Calibration | None
    ) -> torch.Tensor:
        """Tiers int8 `[n, L, H, P]`, 2 or 0, with `pages` pages of `page_tokens` tokens and `floor` for every head.

        `scores` fp32 `[n, L, H, P]`. Ties go to the lower position, head and layer.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Global(Share):
    """KV-Compress (arXiv 2410.00161, section 4.2): the worst pages go, wherever among layers and heads they are."""

    name: ClassVar[str] = "global"

    def plan(self, scores, pages, page_tokens, floor, calibration) -> torch.Tensor:
        return ops.quota(scores, pages, page_tokens, floor)


@dataclass(frozen=True)
class ByLayer(Share):
    """Layers get pages by weight. With `compete` the heads of a layer compete for them, and each keeps at least the
    share `floor` of an even split (AdaKV, arXiv 2407.11550, Algorithm 1 and its safeguard); without, they split evenly.
    """

    compete: bool = False
    floor: float = 0.2

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= 1:
            raise ValueError("floor is a share from 0 to 1")

    def weights(self, layers: int, average: float, most: int, calibration: Calibration | None) -> Sequence[float]:
        """A weight for each layer; `average` pages a layer, of which it can use `most`."""
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
    """Pages and floors of each layer where heads compete, else of each head."""
    by_layer = ops.apportion(weights, pages, heads * floor, heads * per_head)
    if compete:
        return by_layer, [max(floor, int(floor_share * p / heads)) for p in by_layer]
    by_head = [p for layer in by_layer for p in ops.spread(layer, heads)]
    return by_head, [floor] * len(by_head)


@dataclass(frozen=True)
class Uniform(ByLayer):
    """All layers and heads alike, to within one page."""

    name: ClassVar[str] = "uniform"


@dataclass(frozen=True)
class Ada(ByLayer):
    """AdaKV: layers alike, heads of a layer compete.

    Assumed: heads compete in units of pages, as in KV-Compress; a page is worth its best token.
    """

    name: ClassVar[str] = "ada"
    compete: bool = True


@dataclass(frozen=True)
class Pyramid(ByLayer):
    """PyramidKV (arXiv 2406.02069, section 4.2): from the first layer to the last in a straight line.

    The last layer gets 1 / beta of the average and the first as much more. `beta` 20 is its code's default; MiniKV
    (appendix H) takes 7, and runs the line from the top layer, in words that contradict its section 3.1.3: assumed is
    PyramidKV's direction.
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
    """XKV (section IV): each layer's share as measured on samples of a workload and averaged (`layer_shares`).

    Assumed: the heads of a layer split its pages evenly, because the paper's layer keeps the same tokens for all.
    """

    name: ClassVar[str] = "xkv"

    @property
    def needs(self) -> tuple[str, ...]:
        return ("layer_shares",)

    def weights(self, layers, average, most, calibration) -> Sequence[float]:
        return calibration["layer_shares"].tolist()


SHARES: dict[str, type[Share]] = {s.name: s for s in (Global, Uniform, Ada, Pyramid, Xkv)}
