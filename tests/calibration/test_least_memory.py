"""XKV's least memory for a wanted retention: minimal, and the allocation of the share `xkv` at the kept fraction."""

from __future__ import annotations

import pytest
import torch

from kvc_kernels import ops
from sglang_kvc.calibration.measure.least_memory import MOST, least_memory
from sglang_kvc.calibration.measure.passes import calibrate
from sglang_kvc.policies.allocation import SHARES

from .conftest import BLOCK, DIM, KV_HEADS, LAYERS

SHAPE = (LAYERS, KV_HEADS, DIM)


def retained(curves: torch.Tensor, units: list[int]) -> float:
    return sum(float(curve[n - 1]) for curve, n in zip(curves, units, strict=True)) / len(units)


@pytest.mark.parametrize("wanted", [0.3, 0.9, MOST])
def test_share_retains_wanted_attention_with_fewest_tokens(measured, wanted):
    curves = measured.tensors["importance_retention"]
    layers, units = curves.shape
    least = least_memory(curves, wanted, SHAPE, BLOCK)
    kept = [round(x * units) for x in least.layers]
    assert least.retention == wanted and sum(kept) == pytest.approx(least.keep * layers * units)
    assert retained(curves, kept) >= wanted - 1e-6
    if sum(kept) > layers:
        assert retained(curves, ops.greedy_allocation(curves, sum(kept) - 1, 1)) < wanted
    most = KV_HEADS * 8  # pages of a layer
    assert SHARES["xkv"]().weights(layers, least.keep * most, most, {"importance_retention": curves}) == kept


def test_retention_raises_memory(measured):
    curves = measured.tensors["importance_retention"]
    low, high = (least_memory(curves, x, SHAPE, BLOCK) for x in (0.3, 0.9))
    assert low.keep < high.keep and low.ratio > high.ratio > 1


def test_calibration_without_retention_has_none(measured, model, ids):
    assert measured.findings().least_memory is None
    least = calibrate(model, ids, block=BLOCK, retention=0.9).findings().least_memory
    assert least == least_memory(measured.tensors["importance_retention"], 0.9, SHAPE, BLOCK)
