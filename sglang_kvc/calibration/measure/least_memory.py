"""XKV's least memory for a wanted retention (equation 18), from the retention curves of the text."""

from __future__ import annotations

from typing import cast

import torch

from kvc_kernels import ops
from sglang_kvc.cache.sizing import make_layout
from sglang_kvc.calibration.verdicts import LeastMemory
from sglang_kvc.options.config import KvcConfig
from sglang_kvc.policies import POLICIES
from sglang_kvc.policies.budget import compression
from sglang_kvc.policies.prune import Prune

from .capture import CalibrateError

MOST = 0.999  # the points of a curve in fp32 may stay that little below 1


def check(retention: float) -> None:
    """CalibrateError for a retention that cannot be reached, or needs nothing."""
    if not 0 < retention <= MOST:  # nor is nan
        raise CalibrateError(
            f"--retention {retention:g} is not a share of the attention; choose a number above 0 and up to {MOST}, "
            f"like 0.95"
        )


def least_memory(curves: torch.Tensor, retention: float, shape: tuple[int, int, int], block: int) -> LeastMemory:
    """The fewest tokens whose mean retention over layers is `retention` or more. `curves` `[L, U]`:
    `importance_retention`. `shape`: (L, H, D)."""
    layers, heads, head_dim = shape
    units = curves.shape[1]
    # The share `xkv` gives every layer a unit. At `keep` it finds the same allocation, whose units come in one order.
    kept = ops.least_allocation(curves, retention, least=1)
    policy = cast(type[Prune], POLICIES["xkv"])(keep=sum(kept) / (layers * units))
    config = KvcConfig(policy=policy.name, block_size=block)
    layout = make_layout(config, policy, layers=layers, heads=heads, head_dim=head_dim)
    ratio = compression(layout, policy.high_pages(layout))
    return LeastMemory(retention, policy.keep, ratio, tuple(x / units for x in kept))
