"""Settings: the values that options resolve to, and the error for each invalid option."""

from __future__ import annotations

import itertools
import json
import re
from types import SimpleNamespace

import pytest

from kvc_kernels.layout import RING_ENTRY_BYTES, RecordLayout
from kvc_kernels.ops import ScoreSampling
from sglang_kvc.cache.sizing import make_layout
from sglang_kvc.errors import ConfigError
from sglang_kvc.options.config import KvcConfig
from sglang_kvc.options.resolve import parse_bytes, policy_options, resolve_config
from sglang_kvc.options.validate import check_geometry, check_pool, wasted_levels
from sglang_kvc.policies import POLICIES, make_policy

from .conftest import one_sentence

# Policies that read statistics of the model.
CALIBRATED = {
    "xkv": ("importance_retention",),
    "ada-expected": ("query_mean", "query_covariance"),
    "arkv": ("attention_entropy", "attention_shift"),
    "cake": ("query_samples", "rotary_frequencies", "attention_entropy", "attention_shift"),
    "compresskv": ("head_retrieval",),
    "dapq": ("query_samples", "rotary_frequencies"),
    "gate": ("gate_in", "gate_in_bias", "gate_out", "gate_out_bias", "rotary_frequencies"),
}


@pytest.fixture(scope="module")
def statistics(tmp_path_factory) -> str:
    """A calibration file for 2 layers and 4 query heads of size 64; its path has upper-case letters, which must
    survive."""
    import torch
    from safetensors.torch import save_file

    path = str(tmp_path_factory.mktemp("Statistics") / "Model.safetensors")
    save_file(
        {
            "query_mean": torch.zeros(2, 4, 64),
            "query_covariance": torch.zeros(2, 4, 64, 64),
            "importance_retention": torch.tensor([[0.5, 0.75, 1.0], [0.9, 0.95, 1.0]]),
            "query_samples": torch.zeros(2, 4, 3, 64),
            "rotary_frequencies": torch.ones(32),
            "attention_entropy": torch.ones(2),
            "attention_shift": torch.ones(2),
            "head_retrieval": torch.zeros(2, 2),
            "gate_in": torch.zeros(2, 2, 5, 128),
            "gate_in_bias": torch.zeros(2, 2, 5),
            "gate_out": torch.zeros(2, 2, 5),
            "gate_out_bias": torch.zeros(2, 2),
        },
        path,
    )
    return path


def resolve(**options) -> KvcConfig:
    return resolve_config(SimpleNamespace(**{f"kvc_{k}": v for k, v in options.items()}))


def test_defaults():
    assert resolve() == KvcConfig()
    c = resolve()
    assert (c.policy, c.high, c.low, c.window, c.block_size) == ("quantize", "k4v4", None, 0, 128)
    assert (c.page_bytes, c.memory) == (None, None)


def test_each_policy_has_its_own_defaults():
    leankv = resolve(policy="leankv")
    assert (leankv.high, leankv.low, leankv.alpha_high, leankv.alpha_low) == ("k8v4", "k4v2", 1.0, 0.02)
    pruning = resolve(policy="leankv", alpha_high=0, alpha_low=0.1)  # no low tier
    assert (pruning.alpha_high, pruning.alpha_low) == (0.0, 0.1)
    assert resolve(policy="quota").keep == 0.5
    assert resolve(policy="leankv", high="k8v8").low == "k4v2"


def test_policies_read_only_known_settings(statistics):
    settings_names = set(KvcConfig().to_dict())
    for name in POLICIES:
        assert set(policy_options(name)) <= settings_names
        file = {"calibration": statistics} if name in CALIBRATED else {}
        assert resolve(policy=name, **file).summary().startswith(name)


def test_composed_policy_takes_given_parts(statistics):
    c = resolve(policy="prune", scorer="snapkv:window=64,pool=5", share="Ada:floor=0.3", sinks="8", budget="4X")
    assert [str(x) for x in (c.scorer, c.share, c.budget)] == ["snapkv:window=64,pool=5", "ada:floor=0.3", "4x"]
    assert (c.scorer.window, c.share.floor, c.sinks, c.budget.ratio) == (64, 0.3, 8, 4.0)
    assert "budget 4x" in c.summary() and "keep" not in c.summary() and "None" not in c.summary()
    assert resolve(policy="prune", budget=1200).budget.token_bytes == 1200
    assert resolve(policy="minikv").high == "k2v2" and resolve(policy="minikv").window == 128
    assert resolve(policy="ada-expected", calibration=statistics).calibration == statistics


@pytest.mark.parametrize("policy", CALIBRATED)
def test_missing_or_invalid_statistics_are_rejected(policy, statistics, tmp_path):
    import torch
    from safetensors.torch import save_file

    other, text = tmp_path / "other.safetensors", tmp_path / "text"
    save_file({"something": torch.zeros(1)}, str(other))
    text.write_text("no tensors")
    for path in (None, tmp_path / "absent", text, other):
        with pytest.raises(ConfigError) as e:
            resolve(policy=policy, calibration=path)
        assert "--kvc-calibration" in one_sentence(str(e.value))
    with pytest.raises(ConfigError) as e:
        resolve(policy="snapkv", calibration=statistics)
    assert "no effect" in one_sentence(str(e.value))


def test_unreachable_ratio_is_rejected():
    check_geometry(resolve(policy="prune", budget="6x"), head_dim=64)
    for budget in ("40x", "1000x"):
        with pytest.raises(ConfigError) as e:
            check_geometry(resolve(policy="prune", budget=budget), head_dim=64)
        assert "--kvc-budget" in one_sentence(str(e.value))


def test_answers_meet_ratio_that_single_blocks_cannot():
    """Each head of a prompt's block keeps a page, whereas the blocks of an answer share pages."""
    given = {"policy": "kv-compress", "high": "k4v4", "budget": "20x"}
    with pytest.raises(ConfigError) as e:
        check_geometry(resolve(**given), head_dim=128)
    assert "--kvc-budget" in one_sentence(str(e.value))
    late = resolve(**given, lag=512)
    check_geometry(late, head_dim=128)
    policy = make_policy(late)
    layout = make_layout(late, policy, layers=2, heads=3, head_dim=128)
    pages = policy.answer_pages(layout, 1000, 4)
    pages += 4 * policy.block_formats(layout)[2].pages
    size = pages * (layout.page_bytes + RING_ENTRY_BYTES) + 1004 * layout.block_meta_bytes
    assert 20 <= 4 * 2 * 3 * 128 * 128 * 1004 / size < 20.02
    with pytest.raises(ConfigError):  # the tables alone exceed the budget
        check_geometry(resolve(**{**given, "budget": "120x"}, lag=512), head_dim=128)


@pytest.mark.parametrize("policy", POLICIES)
def test_bf16_disables_every_policy(policy):
    assert resolve(policy=policy, high="bf16") == KvcConfig(high="bf16")
    assert resolve(policy=policy, high="bf16").formats == ()


def test_bf16_rejects_options_without_effect():
    for policy, option in (("prune", {"keep": "0.3"}), ("prune", {"budget": "4x"}), ("leankv", {"alpha_high": "2"})):
        with pytest.raises(ConfigError) as e:
            resolve(policy=policy, high="bf16", **option)
        assert "--kvc-high bf16" in one_sentence(str(e.value))


def test_pool_is_checked_against_model_size():
    """A budget in bytes and the minimum memory are checked before weights are read."""
    model = dict(layers=32, heads=8, head_dim=128)
    check_pool(resolve(policy="prune", budget="20000", memory="4GB"), **model)
    for given, named in (({"policy": "prune", "budget": "1200"}, "--kvc-budget 1200"), ({"memory": "1MiB"}, "MiB")):
        with pytest.raises(ConfigError) as e:
            check_pool(resolve(**given), **model)
        assert named in one_sentence(str(e.value))


def test_memory_includes_rows_staged_by_prefill():
    model = dict(layers=4, heads=8, head_dim=128)
    check_pool(resolve(memory="10MiB"), **model)
    with pytest.raises(ConfigError, match=r"besides 2\.5 MiB"):
        check_pool(resolve(memory="10MiB", window=64), **model)


@pytest.mark.parametrize("option", ["memory", "host_memory", "disk_size"])
@pytest.mark.parametrize("window", [0, 64])
def test_advised_sizes_are_accepted(option, window):
    for policy, layers, heads, head_dim in itertools.product(("quantize", "prune"), (1, 3, 32), (1, 5), (64, 80, 128)):
        given = {"policy": policy, "window": window, "memory": "4GB", "host_memory": "1GB"}
        if option == "disk_size":
            given["disk"] = "anywhere"
        model = dict(layers=layers, heads=heads, head_dim=head_dim)
        try:
            if option == "disk_size":
                with pytest.raises(ConfigError, match="disk-size of 0 bytes does not hold"):
                    check_pool(resolve(**given | {option: "0"}), **model)
            check_pool(resolve(**given | {option: "1048576" if option == "memory" else "1"}), **model)
        except ConfigError as e:
            advised = re.search(r"give at least ([^ ,]+)", one_sentence(str(e)))[1]
            check_pool(resolve(**given | {option: advised}), **model)
        else:
            assert option == "memory", "a byte holds no block"


def test_host_memory_below_whole_units_of_a_block_is_refused():
    """A block takes whole units of host memory, which are larger than its record."""
    model = dict(layers=3, heads=5, head_dim=80)
    layout = make_layout(config := resolve(), make_policy(config), **model)
    record_bytes = RecordLayout(layout).num_bytes(layout.block_pages_bf16)
    with pytest.raises(ConfigError, match="does not hold an uncompressed block"):
        check_pool(resolve(host_memory=str(record_bytes)), **model)


def test_levels_that_save_no_memory_are_reported():
    messages = wasted_levels(resolve(levels="k8v4,k4v2,k2v2"), head_dim=128)
    assert [one_sentence(x).split()[-2:] for x in messages] == [["k8v8", "instead."], ["drop", "it."]]
    assert not wasted_levels(resolve(levels="k8v8,k2v2"), head_dim=64)
    assert not wasted_levels(resolve(high="k8v4", levels="k4v2"), head_dim=128)
    assert not wasted_levels(resolve(high="bf16", levels="k4v4"), head_dim=64)
    assert not wasted_levels(resolve(high="bf16", levels="k4v4,k8v8"), head_dim=64)
    (message,) = wasted_levels(resolve(high="bf16", levels="k8v4,k4v4"), head_dim=64)
    assert "pages fit k8v4; drop it" in one_sentence(message)


def test_numbers_are_parsed_from_text():
    c = resolve(policy="quota", block_size="128", keep="0.25", window="0", memory="4GB", page_bytes="2048")
    assert (c.block_size, c.keep, c.window, c.memory, c.page_bytes) == (128, 0.25, 0, 4 * 10**9, 2048)
    assert resolve(policy="leankv", observe="32").observe == ScoreSampling(32)
    assert resolve(policy="leankv", observe="ALL/16").observe == ScoreSampling(stride=16)
    assert resolve(levels="K8V8, k2v2").levels == resolve(levels=("k8v8", "k2v2")).levels == ("k8v8", "k2v2")
    assert resolve(high="K8V4").high == "k8v4"


@pytest.mark.parametrize(
    "text, size",
    [
        ("4GB", 4 * 10**9),
        ("4G", 4 * 10**9),
        ("512MiB", 512 << 20),
        ("1.5 GiB", 3 << 29),
        ("20000000", 20_000_000),
        (2_000_000, 2_000_000),
        ("1e9", 10**9),
        ("2tb", 2 * 10**12),
    ],
)
def test_sizes_are_parsed_from_text(text, size):
    assert parse_bytes("memory", text) == size


WRONG = [
    ({"allow_lossless": "perhaps"}, "--kvc-allow-lossless"),
    ({"allow_one_shot": "8x"}, "--kvc-allow-one-shot"),
    ({"policy": "leankv", "trust": "none"}, "--kvc-trust"),
    ({"eviction": "lru"}, "--kvc-eviction"),
    ({"running_share": 0}, "--kvc-running-share"),
    ({"running_share": 1.5}, "--kvc-running-share"),
    ({"running_share": "half"}, "--kvc-running-share"),
    ({"policy": "magic"}, "--kvc-policy"),
    ({"high": "k3v3"}, "--kvc-high"),
    ({"high": "fp8"}, "--kvc-high"),
    ({"policy": "leankv", "low": "k1v1"}, "--kvc-low"),
    ({"policy": "leankv", "high": "k4v4", "low": "k8v4"}, "--kvc-low"),
    ({"policy": "leankv", "high": "k4v4", "low": "k4v4"}, "--kvc-low"),
    ({"policy": "leankv", "high": "k8v4", "low": "k4v8"}, "--kvc-low"),
    ({"policy": "leankv", "high": "bf16", "low": "k4v4"}, "--kvc-low"),
    ({"policy": "leankv", "low": "bf16"}, "--kvc-low"),
    ({"low": "k4v2"}, "--kvc-low"),
    ({"keep": 0.5}, "--kvc-keep"),
    ({"policy": "quota", "alpha_low": 0.1}, "--kvc-alpha-low"),
    ({"policy": "quota", "keep": 0}, "--kvc-keep"),
    ({"policy": "quota", "keep": -1}, "--kvc-keep"),
    ({"policy": "quota", "keep": 1.01}, "--kvc-keep"),
    ({"policy": "quota", "keep": "half"}, "--kvc-keep"),
    ({"policy": "quota", "keep": float("nan")}, "--kvc-keep"),
    ({"policy": "prune", "keep": 0.5, "budget": "4x"}, "--kvc-budget"),
    ({"policy": "prune", "budget": "small"}, "--kvc-budget"),
    ({"policy": "prune", "budget": "0x"}, "--kvc-budget"),
    ({"policy": "prune", "budget": "-100"}, "--kvc-budget"),
    ({"budget": "4x"}, "--kvc-budget"),
    ({"policy": "leankv", "scorer": "h2o"}, "--kvc-scorer"),
    ({"policy": "prune", "scorer": "magic"}, "--kvc-scorer"),
    ({"policy": "prune", "scorer": "snapkv:width=3"}, "--kvc-scorer"),
    ({"policy": "prune", "scorer": "keydiff:width=3"}, "--kvc-scorer"),
    ({"policy": "prune", "scorer": "snapkv:window=much"}, "--kvc-scorer"),
    ({"policy": "prune", "scorer": "snapkv:pool=4"}, "--kvc-scorer"),
    ({"policy": "prune", "scorer": "snapkv:window=0"}, "--kvc-scorer"),
    ({"policy": "prune", "scorer": "kv-compress:power=3"}, "--kvc-scorer"),
    ({"policy": "prune", "share": "magic"}, "--kvc-share"),
    ({"policy": "prune", "share": "pyramid:beta=0.5"}, "--kvc-share"),
    ({"policy": "prune", "share": "ada:compete=maybe"}, "--kvc-share"),
    ({"policy": "prune", "sinks": -1}, "--kvc-sinks"),
    ({"policy": "prune", "sinks": 129}, "--kvc-sinks"),
    ({"policy": "prune", "calibration": "somewhere"}, "--kvc-calibration"),
    ({"policy": "prune", "low": "k8v8"}, "--kvc-low"),
    ({"policy": "leankv", "alpha_low": 2}, "--kvc-alpha-low"),
    ({"policy": "leankv", "alpha_low": -0.1}, "--kvc-alpha-low"),
    ({"policy": "leankv", "alpha_low": 0.3, "alpha_high": 0.2}, "--kvc-alpha-low"),
    ({"policy": "leankv", "alpha_low": 0, "alpha_high": -1}, "--kvc-alpha-high"),
    ({"policy": "leankv", "alpha_high": "inf"}, "--kvc-alpha-high"),
    ({"policy": "leankv", "observe": 0}, "--kvc-observe"),
    ({"policy": "leankv", "observe": "some"}, "--kvc-observe"),
    ({"policy": "leankv", "observe": "all/3"}, "--kvc-observe"),
    ({"block_size": 7}, "--kvc-block-size"),
    ({"block_size": 0}, "--kvc-block-size"),
    ({"block_size": -256}, "--kvc-block-size"),
    ({"block_size": 2048}, "--kvc-block-size"),
    ({"block_size": "many"}, "--kvc-block-size"),
    ({"block_size": 64.5}, "--kvc-block-size"),
    ({"block_size": True}, "--kvc-block-size"),
    ({"window": -1}, "--kvc-window"),
    ({"window": 10**9}, "--kvc-window"),
    ({"lag": 512}, "--kvc-lag"),
    ({"policy": "leankv", "lag": 100}, "--kvc-lag"),
    ({"policy": "leankv", "lag": -64}, "--kvc-lag"),
    ({"policy": "leankv", "lag": 64}, "--kvc-lag"),  # the lag must exceed the window
    ({"policy": "leankv", "lag": 1 << 21}, "--kvc-lag"),
    ({"policy": "h2o", "lag": "long"}, "--kvc-lag"),
    ({"policy": "quota", "lag": 512}, "--kvc-lag"),
    ({"policy": "mikv", "lag": 512}, "--kvc-lag"),
    ({"page_bytes": 100}, "--kvc-page-bytes"),
    ({"page_bytes": 2050}, "--kvc-page-bytes"),
    ({"page_bytes": 1 << 30}, "--kvc-page-bytes"),
    ({"memory": "banana"}, "--kvc-memory"),
    ({"memory": "4XB"}, "--kvc-memory"),
    ({"memory": "-4GB"}, "--kvc-memory"),
    ({"memory": "0"}, "--kvc-memory"),
    ({"memory": "4"}, "--kvc-memory"),
    ({"levels": ["k8v4"]}, "--kvc-levels"),
    ({"levels": 5}, "--kvc-levels"),
    ({"floor": "k3v3"}, "--kvc-floor"),
    ({"floor": "k4v4"}, "--kvc-floor"),  # the floor must differ from the server's format
    ({"high": "k4v8", "floor": "k8v4"}, "--kvc-floor"),
    ({"high": "k2v2", "floor": "k2v2"}, "--kvc-floor"),
    ({"high": "bf16", "floor": "k4v4"}, "--kvc-floor"),
    ({"policy": "leankv", "floor": "k2v2"}, "--kvc-floor"),
    ({"policy": "quota", "floor": "k2v2"}, "--kvc-floor"),
    ({"policy": "max", "floor": "k2v2"}, "--kvc-floor"),
    ({"policy": "prune", "budget": [4]}, "--kvc-budget"),
    ({"policy": "prune", "scorer": ["h2o"]}, "--kvc-scorer"),
]


@pytest.mark.parametrize("options, flag", WRONG, ids=lambda x: str(x))
def test_wrong_values_are_rejected_with_one_sentence(options, flag):
    with pytest.raises(ConfigError) as e:
        resolve(**options)
    assert flag in one_sentence(str(e.value))
    assert isinstance(e.value, ValueError)


def test_too_few_key_bytes_are_rejected():
    check_geometry(KvcConfig(high="k4v2"), head_dim=32)
    check_geometry(KvcConfig(high="k2v2"), head_dim=64)
    with pytest.raises(ConfigError, match="head size 32") as e:
        check_geometry(KvcConfig(high="k2v2"), head_dim=32)
    assert "4 bits" in one_sentence(str(e.value))


def test_page_too_small_for_model_is_rejected():
    small = resolve(page_bytes=512)
    check_geometry(resolve(page_bytes=2048), head_dim=64)
    with pytest.raises(ConfigError) as e:
        check_geometry(small, head_dim=128)
    assert "--kvc-page-bytes" in one_sentence(str(e.value))


def test_page_as_large_as_uncompressed_tokens_is_rejected():
    check_geometry(resolve(page_bytes=32768), head_dim=128)  # half of a head's uncompressed block
    with pytest.raises(ConfigError) as e:
        check_geometry(resolve(page_bytes=65536), head_dim=128)
    assert "--kvc-page-bytes 65536 cannot be used" in one_sentence(str(e.value))
    for pruned in ({"policy": "quota", "keep": 0.25}, {"policy": "prune", "budget": "4x"}, {"policy": "leankv"}):
        check_geometry(resolve(page_bytes=8192, high="k8v8", **pruned), head_dim=128)


def test_budget_without_effect_is_rejected():
    for policy, budget in (("prune", "1x"), ("prune", "3.5x"), ("mikv", "1x")):
        with pytest.raises(ConfigError) as e:
            check_geometry(resolve(policy=policy, budget=budget), head_dim=128)
        assert f"--kvc-budget {budget} has no effect" in one_sentence(str(e.value))
    with pytest.raises(ConfigError, match="--kvc-budget 200000 has no effect"):
        check_pool(resolve(policy="prune", budget="200000"), layers=32, heads=8, head_dim=128)


def test_lag_of_policy_is_named_as_its_default():
    with pytest.raises(ConfigError, match="--kvc-lag 192, the default of policy lazy-eviction, is out of range"):
        resolve(policy="lazy-eviction", window=256)
    with pytest.raises(ConfigError, match="--kvc-lag 128 is out of range"):
        resolve(policy="lazy-eviction", window=256, lag=128)


@pytest.mark.parametrize("policy", POLICIES)
def test_settings_round_trip_as_text(policy, statistics):
    """The settings that a server reports start an equal server."""
    file = {"calibration": statistics} if policy in CALIBRATED else {}
    config = resolve(policy=policy, **file)
    reported = json.loads(json.dumps(config.to_dict()))
    reads = {*policy_options(policy), "policy", "window", "block_size"} - ({"keep"} if reported["budget"] else set())
    assert resolve(**{name: reported[name] for name in reads}) == config
