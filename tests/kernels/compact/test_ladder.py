"""The content of a demoted block compared with a block packed directly, computed from the definition of the formats."""

from __future__ import annotations

import pytest
import torch

from kvc_kernels import ops
from kvc_kernels.common import quant
from kvc_kernels.formats import FORMATS
from tests.support.pages import block_formats_of, fill, make_store, random_kv

BLOCKS = torch.tensor([5, 2, 3])
STEPS = [("k8v8", "k8v4"), ("k8v4", "k4v4"), ("k4v8", "k4v4"), ("k4v4", "k4v2"), ("k4v2", "k2v2"), ("k8v4", "k2v2")]


def packed(names: tuple[str, ...]):
    """The original rows (`[n, H, P, D]`, fp32) and the rows stored after moving through each of the formats `names`."""
    store = make_store(block_formats_of(*names), head_dim=64, block_tokens=64, page_bytes=3264)
    fill(store, BLOCKS, *random_kv(store, 3 * 64, seed=4))
    before = [x.float() for x in ops.load_dense(store, 0, BLOCKS, 0)[:2]]
    for to in range(1, len(names) + 1):
        ops.compact(store, BLOCKS, to, None, from_format=to - 1)
    return before, ops.load_dense(store, 0, BLOCKS, len(names))[:2]


def off(got, want) -> float:
    """RMS error relative to the RMS of the rows."""
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("source, target", STEPS)
def test_demoted_block_stores_requantized_source(source, target):
    """Values equal packing the dequantized source; keys equal mapping the source's codes."""
    _, (k, v) = packed((source,))
    (k0, _), (k2, v2) = packed((source, target))
    dst, src = FORMATS[target], FORMATS[source]
    groups = 2 if dst.value_bits == 2 else 1
    want = quant.dequantize_tokens(*quant.quantize_tokens(v, dst.value_bits, groups)) if dst != src else v
    if dst.value_bits == src.value_bits:
        want = v
    assert torch.equal(v2, want)
    header = quant.key_header(k0, torch.ones(k0.shape[:-1], dtype=torch.bool))
    scale, zero = quant.channel_scale_zero(header, src.key_bits)
    codes = ((k - zero) / torch.where(scale > 0, scale, 1)).round().to(torch.uint8)
    steps = (2**src.key_bits - 1) // (2**dst.key_bits - 1)
    assert torch.equal(k2, quant.dequantize_keys((codes.float() / steps).round(), header, dst.key_bits)) or (
        source == "k8v4" and target == "k2v2"  # through 4 bits: rounded twice
    )


@pytest.mark.parametrize("source, target", STEPS)
def test_error_of_demoted_block_stays_near_its_format(source, target):
    """Compared with packing directly, keys are as precise, and values add at most the error of the source."""
    (k0, v0), demoted = packed((source, target))
    _, at_once = packed((target,))
    _, first = packed((source,))
    for name, plain, got, direct, source_rows in zip("KV", (k0, v0), demoted, at_once, first):
        demoted_error, direct_error = off(got, plain), off(direct, plain)
        print(f"{source} -> {target}: {name} {demoted_error:.4f}, at once {direct_error:.4f}")
        assert demoted_error**2 <= 1.02 * (direct_error**2 + off(source_rows, plain) ** 2)
        assert demoted_error <= 1.06 * direct_error
