"""The budget option: the pages that fit a target in bytes, and the error for an unreachable target."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kvc_kernels import ops
from kvc_kernels.formats import BF16, FORMATS
from kvc_kernels.layout import PoolLayout
from sglang_kvc.cache.build import build_runtime
from sglang_kvc.cache.sizing import make_layout
from sglang_kvc.calibration.tensors import check_shapes, load
from sglang_kvc.options.config import KvcConfig
from sglang_kvc.options.resolve import resolve_config
from sglang_kvc.policies import Prune, make_policy
from sglang_kvc.policies.budget import Budget, compression, token_bytes
from tests.options.conftest import one_sentence

from .support import D, H, L, P, World, statistics

LAYOUT = PoolLayout(4, 2, 64, 128, 2304)


@pytest.mark.parametrize("text, want", [("4x", Budget(4.0)), ("3.5 X", Budget(3.5)), ("1200", Budget(None, 1200.0))])
def test_budget_is_parsed_from_text(text, want):
    assert Budget.parse(text) == want


@pytest.mark.parametrize("text", ["", "x", "4y", "-4x", "0", "1e3", "four"])
def test_invalid_budget_text_is_rejected(text):
    with pytest.raises(ValueError, match="neither"):
        Budget.parse(text)


@pytest.mark.parametrize("formats", ["k4v4", "k8v8", "k2v2", "k8v4+k4v2", "k4v4+k2v2"])
@pytest.mark.parametrize("ratio", [2, 3, 4, 6])
def test_plan_uses_most_pages_within_budget(formats, ratio):
    high, low = [*formats.split("+"), None][:2]
    bf16 = 4 * LAYOUT.layers * LAYOUT.heads * LAYOUT.head_dim
    plans = [Prune(high=high, low=low, budget=text) for text in (f"{ratio}x", str(bf16 / ratio))]
    try:
        pages = {p.high_pages(LAYOUT) for p in plans}
    except ValueError as e:
        assert "--kvc-budget" in one_sentence(f"{e}.")
        least = plans[0].block_pages(LAYOUT, plans[0].floor_pages(LAYOUT) * LAYOUT.layers * LAYOUT.heads)
        assert compression(LAYOUT, least) < ratio
        return
    (n,) = pages
    block_pages = plans[0].block_pages(LAYOUT, n)
    assert compression(LAYOUT, block_pages) >= ratio and token_bytes(LAYOUT, block_pages) <= bf16 / ratio
    if n < LAYOUT.block_pages(plans[0].block_formats(LAYOUT)[1].high):
        assert compression(LAYOUT, plans[0].block_pages(LAYOUT, n + 1)) < ratio


def test_token_bytes_match_packed_block():
    """Bytes per token of a packed block, measured in the store that holds it."""
    policy = Prune(budget="5x")
    world = World.make(policy)
    layout = world.store.layout
    pages = ops.compact(world.store, world.row[:3], 1, world.tiers(), from_format=0)
    num_bytes = int(pages[0]) * (layout.page_bytes + world.store.ring.element_size()) + layout.block_meta_bytes
    assert token_bytes(layout, int(pages[0])) == num_bytes / P
    assert 4 * L * H * D * P / num_bytes >= 5


def test_budget_met_by_format_keeps_every_token():
    assert (World.make(Prune(budget="1.5x")).tiers() == 2).all()


def test_runtime_rejects_unreachable_budget_and_mismatched_statistics(tmp_path):
    size = {"num_bytes": 1 << 26, "layers": L, "heads": H, "head_dim": D, "dtype": torch.bfloat16, "device": "cpu"}
    with pytest.raises(ValueError, match="--kvc-budget 3 cannot be met") as e:
        build_runtime(KvcConfig(policy="prune", budget="3"), **size)
    one_sentence(f"{e.value}.")
    other = {**size, "layers": 3}
    parts = {"scorer": "expected-attention", "share": "ada", "calibration": statistics(tmp_path)}
    config = KvcConfig(policy="ada-expected", **parts)
    with pytest.raises(ValueError, match=r"--kvc-calibration .* does not fit") as e:
        build_runtime(config, **other)
    one_sentence(f"{e.value}.")
    assert build_runtime(config, **size).policy.scope == "block"


def test_statistics_of_other_shapes_are_rejected(tmp_path):
    path = statistics(tmp_path)
    layout = PoolLayout(L, H, D, P, 1152)
    names = ("query_mean", "query_covariance", "importance_retention", "attention_variance", "head_retrieval")
    check_shapes(path, names, layout)
    for other in (PoolLayout(L + 1, H, D, P, 1152), PoolLayout(L, 3, D, P, 1152), PoolLayout(L, H, 2 * D, P, 1152)):
        with pytest.raises(ValueError, match="does not fit"):
            check_shapes(path, names, other)
    assert load(path, torch.device("cpu")) is load(path, torch.device("cpu"))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_max_preset_saves_seven_times_with_small_pages(head_dim):
    config = resolve_config(SimpleNamespace(kvc_policy="max", kvc_block_size=128))
    policy = make_policy(config)
    layout = make_layout(config, policy, layers=24, heads=2, head_dim=head_dim)
    assert layout.page(FORMATS["k4v2"]).tokens == 32
    assert compression(layout, policy.high_pages(layout)) >= 7


def test_page_size_grows_until_it_holds_uncompressed_tokens():
    """16 tokens of k4v2 take fewer bytes than 4 of bf16, the number that a thread writes at a time."""
    config = resolve_config(SimpleNamespace(kvc_policy="max", kvc_block_size=128))
    Fine = type("Fine", (type(make_policy(config)),), {"page_tokens": 16})
    layout = make_layout(config, Fine(), layers=24, heads=2, head_dim=64)
    assert layout.page(FORMATS["k4v2"]).tokens == 32 and layout.page(BF16).tokens >= 4


def test_given_page_size_is_used():
    config = resolve_config(SimpleNamespace(kvc_policy="max", kvc_block_size=128))
    policy = make_policy(config)
    with_page_size = replace(config, page_bytes=4352)
    assert make_layout(with_page_size, policy, layers=24, heads=2, head_dim=64).page_bytes == 4352


@pytest.mark.parametrize("high, low, keep, pages", [
    ("k4v4", "k2v2", 0.25, 128), ("k4v4", "k2v2", 0.5, 160), ("k8v4", "k4v2", 0.5, 224), ("k8v4", "k4v2", 0.25, 192),
])  # fmt: skip
def test_bound_of_two_tiers_is_the_most_that_any_division_takes(high, low, keep, pages):
    """At 64 heads, against a search over all divisions of the high pages."""
    config = resolve_config(SimpleNamespace(kvc_policy="prune", kvc_high=high, kvc_low=low, kvc_keep=keep))
    policy = make_policy(config)
    layout = make_layout(config, policy, layers=8, heads=8, head_dim=128)
    high_tokens, low_tokens = (layout.page(FORMATS[name]).tokens for name in (high, low))
    total, least, most = policy.high_pages(layout), policy.floor_pages(layout), -(-layout.block_tokens // high_tokens)
    sums = {0: 0}  # high pages -> most low pages
    for _ in range(64):
        longer: dict[int, int] = {}
        for used, best in sums.items():
            for k in range(least, min(most, total - used) + 1):
                rest = max(0, layout.block_tokens - k * high_tokens)
                longer[used + k] = max(longer.get(used + k, 0), best - (-rest // low_tokens))
        sums = longer
    assert policy.block_pages(layout, total) == total + sums[total] == pages
