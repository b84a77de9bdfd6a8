"""`Share`: allocation of a block's pages to its layers and heads. `SHARES` lists all shares.

The block format gives the number of pages, which the CPU knows before any score. A share says which heads compete for
them: all heads of all layers, the heads of a layer, or none (each head keeps its best tokens in a fixed number of
pages).
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
        """A weight for each layer. Layers have `average` pages on average and can use at most `most`."""
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
class Tilted(ByLayer):
    """Base of shares that divide only part of the pages unevenly. The share `even` of the pages is split evenly among
    the layers, like the recent tokens of MiniKV, for which every layer has the same budget."""

    even: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.even < 1:
            raise ValueError("even is a share from 0 to below 1")


@dataclass(frozen=True)
class Pyramid(Tilted):
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
        even = self.even * average
        return [even + x for x in ops.pyramid(layers, average - even, most - even, self.beta)]


@dataclass(frozen=True)
class Variance(Tilted):
    """MiniKV's Var-prop (arXiv 2411.18077, section 3.1.3): a layer's pages are proportional to the variance of its
    cumulative attention over tokens (`attention_variance`). `inverse` is Var-inv.

    Assumed: the variance is that of the calibration text, which the CPU knows before it plans, where the paper takes
    the prompt's.
    """

    name: ClassVar[str] = "variance"
    inverse: bool = False

    @property
    def needs(self) -> tuple[str, ...]:
        return ("attention_variance",)

    def weights(self, layers, average, most, calibration) -> Sequence[float]:
        # A layer without variance gets a very small or very large weight, but a finite one.
        variances = [max(x, 1e-12) for x in calibration["attention_variance"].tolist()]
        variances = [1 / x for x in variances] if self.inverse else variances
        unit = (1 - self.even) * average * layers / sum(variances)
        return [self.even * average + unit * x for x in variances]


@dataclass(frozen=True)
class Cake(ByLayer):
    """CAKE (arXiv 2503.12491): a layer's pages are proportional to its preference `H^(1/tau1) V^(1/tau2)`.

    H is the entropy of its attention (`attention_entropy`), V the variance of a token's attention over queries, summed
    over tokens (`attention_shift`).

    Assumed: both are those of the calibration text, which the CPU knows before it plans. The paper measures every
    prompt and shrinks earlier layers while later ones are computed (its cascade). tau1 = tau2 = 1, which the paper
    tunes for each model.
    """

    name: ClassVar[str] = "cake"
    tau1: float = 1.0
    tau2: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.tau1 > 0 and self.tau2 > 0):
            raise ValueError("tau1 and tau2 are above 0")

    @property
    def needs(self) -> tuple[str, ...]:
        return ("attention_entropy", "attention_shift")

    def weights(self, layers, average, most, calibration) -> Sequence[float]:
        entropy, shift = (calibration[name].double() for name in self.needs)
        return (entropy ** (1 / self.tau1) * shift ** (1 / self.tau2)).tolist()


@dataclass(frozen=True)
class Xkv(ByLayer):
    """XKV (section IV): the allocation that retains most attention, by the curves of a workload's prompts
    (`importance_retention`), at the share of the tokens that is kept.

    Assumed: the heads of a layer split its pages evenly, because the paper keeps the same tokens for all of them. The
    prompts are the calibration text up to four ends, where the paper samples the tasks of a workload and averages their
    allocations instead of their curves.
    """

    name: ClassVar[str] = "xkv"

    @property
    def needs(self) -> tuple[str, ...]:
        return ("importance_retention",)

    def weights(self, layers, average, most, calibration) -> Sequence[float]:
        return _best_allocation(calibration["importance_retention"], average / most)


# Tensors are compared by identity here; `calibration.tensors.load` returns the same one for the same file.
@functools.lru_cache(maxsize=16)
def _best_allocation(curves: torch.Tensor, kept: float) -> list[int]:
    layers, units = curves.shape
    return ops.greedy_allocation(curves, min(layers * units, max(layers, round(kept * layers * units))), least=1)


SHARES: dict[str, type[Share]] = {s.name: s for s in (Global, Uniform, Ada, Pyramid, Variance, Cake, Xkv)}
