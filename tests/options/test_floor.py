"""`--kvc-floor`: the intermediate formats, their page size, and the rejected values."""

from __future__ import annotations

import itertools
import json

import pytest

from bench.common import RESULTS
from kvc_kernels.formats import BF16, FORMATS
from sglang_kvc.cache.sizing import make_layout
from sglang_kvc.errors import ConfigError
from sglang_kvc.options.request_quality import offered
from sglang_kvc.options.validate import check_geometry, check_pool
from sglang_kvc.policies import make_policy
from sglang_kvc.policies.ladder import LOSS, is_below, next_lower, step_cost, steps

from .conftest import one_sentence
from .test_config import resolve

LADDERS = {
    ("k8v8", "k2v2"): ("k8v4", "k4v4", "k4v2", "k2v2"),
    ("k8v4", "k4v4"): ("k4v4",),
    ("k8v4", "k2v2"): ("k4v4", "k4v2", "k2v2"),
    ("k8v8", "k4v8"): ("k4v8",),
    ("k4v8", "k4v2"): ("k4v4", "k4v2"),
    ("k4v4", "k8v4"): (),
    ("k4v4", None): (),
    ("bf16", "k4v4"): (),
}


@pytest.mark.parametrize("ends, between", LADDERS.items(), ids=str)
def test_each_ladder_step_is_below_previous_one(ends, between):
    assert steps(*ends) == between
    assert all(is_below(low, high) for high, low in zip((ends[0], *between), between))


def test_lower_format_has_no_more_key_or_value_bits():
    below = {(a, b) for a in FORMATS for b in FORMATS if is_below(a, b)}
    assert ("k4v8", "k8v4") not in below and ("k8v4", "k4v8") not in below
    assert not any("bf16" in pair or pair[0] == pair[1] for pair in below)
    assert {a for a, b in below if b == "k8v4"} == {"k4v4", "k4v2", "k2v2"}


def formats_of(config, **sizes):
    policy = make_policy(config)
    layout = make_layout(config, policy, layers=2, heads=2, **sizes)
    return layout, policy, policy.block_formats(layout)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("block_size", [64, 128, 256])
@pytest.mark.parametrize("ends", [x for x in LADDERS if LADDERS[x]], ids=str)
def test_page_size_lets_floor_save_memory(ends, block_size, head_dim):
    high, floor = ends
    config = resolve(high=high, floor=floor, block_size=block_size)
    layout, policy, block_formats = formats_of(config, head_dim=head_dim)
    policy.check(layout)
    check_geometry(config, head_dim=head_dim)
    lower = next_lower(block_formats, policy.ladder)
    path = [1]
    while lower[path[-1]]:
        path.append(lower[path[-1]])
    assert len(path) > 1 and block_formats[path[-1]].pages == block_formats[1 + len(LADDERS[ends])].pages
    pages = [block_formats[i].pages for i in path]
    assert all(a > b for a, b in itertools.pairwise(pages))
    assert all(block_format.exact for block_format in block_formats)
    assert all(f.pages <= layout.block_pages(BF16) for f in block_formats[1:])


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("block_size", [64, 128, 256])
def test_lower_step_costs_more_per_page(block_size, head_dim):
    """Then the cheapest step of blocks of equal age is that of the highest tier."""
    for high, floor in itertools.permutations(LOSS, 2):
        if steps(high, floor):
            config = resolve(high=high, floor=floor, block_size=block_size)
            _, policy, block_formats = formats_of(config, head_dim=head_dim)
            lower, path = next_lower(block_formats, policy.ladder), [1]
            while lower[path[-1]]:
                path.append(lower[path[-1]])
            costs = [step_cost(block_formats[a], block_formats[b]) for a, b in itertools.pairwise(path)]
            assert costs and 0 < costs[0] and all(a < b for a, b in itertools.pairwise(costs)), (high, floor)


def test_losses_are_measured_means():
    measured, models = dict.fromkeys(LOSS, 0.0), ("qwen-0.5b", "qwen-1.5b")
    for model in models:
        cells = raw(f"quality/policies_{model}_2048")["cells"]
        rows = raw(f"calibrate/{model}")["formats"]
        simulated = {x["format"]: x["kl_mean"] for x in rows if x["key_mode"] == "channel"}
        for name in LOSS:
            kl = cells[name]["kl"]["mean"] if name in cells else LOSS["k4v4"] * simulated["k4v8"] / simulated["k4v4"]
            measured[name] += kl / len(models)
    assert pytest.approx(measured, rel=0.03) == LOSS


def raw(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())["numbers"]


def test_named_formats_have_separate_ids():
    config = resolve(high="k8v4", floor="k4v4", levels="k4v4,k2v2")
    _, policy, block_formats = formats_of(config, head_dim=128)
    assert [f.high.name for f in block_formats] == ["bf16", "k8v4", "k4v4", "k4v4", "k2v2", "k8v4"]
    assert [policy.format_id_of(x) for x in (None, "k4v4", "k2v2", "k8v4", "lossless")] == [1, 3, 4, 5, 0]
    assert policy.ladder == (1, 2) and next_lower(block_formats, policy.ladder) == (0, 2, 0, 0, 0, 0)
    assert offered(config) == ("lossless", "one-shot", "k4v4", "k2v2", "k8v4") and policy.default_level is None
    assert [policy.fake_quant_format(i) for i in range(6)] == [None, *(f.high for f in block_formats[1:])]


def test_no_ladder_without_floor():
    config = resolve(high="k8v4", levels="k2v2")
    _, policy, block_formats = formats_of(config, head_dim=128)
    assert policy.ladder == () and not any(next_lower(block_formats, policy.ladder))
    assert len(block_formats) == 3 and offered(config) == ("lossless", "one-shot", "k2v2")
    assert policy.default_level == "k8v4"


def test_page_size_at_which_floor_saves_nothing_is_rejected():
    model = dict(layers=4, heads=2, head_dim=128)
    check_pool(resolve(high="k8v4", floor="k4v4", page_bytes="6336"), **model)
    with pytest.raises(ConfigError) as e:
        check_pool(resolve(high="k8v4", floor="k4v4", page_bytes="12544"), **model)
    assert "--kvc-page-bytes" in one_sentence(str(e.value)) and "2 pages" in str(e.value)


@pytest.mark.parametrize("policy", ["quantize", "safe", "balanced"])
def test_quantize_presets_accept_floor(policy):
    assert resolve(policy=policy, floor="k4v2").floor == "k4v2"
