"""`--kvc-one-shot`: a budget for the prompts of all requests that name no level."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from kvc_kernels.layout import RING_ENTRY_BYTES
from sglang_kvc.cache.one_shot import Budget
from sglang_kvc.cache.sizing import make_layout
from sglang_kvc.errors import ConfigError
from sglang_kvc.options import start
from sglang_kvc.options.config import KvcConfig
from sglang_kvc.options.resolve import resolve_config
from sglang_kvc.options.start_warnings import one_shot_warning
from sglang_kvc.options.unsupported_models import ModelFacts, check_facts, check_model
from sglang_kvc.policies import make_policy

from .conftest import configurator, one_sentence


def resolve(**options) -> KvcConfig:
    return resolve_config(SimpleNamespace(**{f"kvc_{k}": v for k, v in options.items()}))


@pytest.mark.parametrize(
    "value, budget",
    [
        ("16x", Budget(ratio=16)), ("4.5X", Budget(ratio=4.5)), ("64x", Budget(ratio=64)), ("65", Budget(tokens=65)),
        (1024, Budget(tokens=1024)), ("one-shot:16x", Budget(ratio=16)), (Budget(tokens=99), Budget(tokens=99)),
    ],
)  # fmt: skip
def test_value_is_ratio_or_tokens(value, budget):
    config = resolve(one_shot=value)
    assert config.one_shot == budget
    assert config.summary() == f"{resolve().summary()}, {budget}"
    # The settings that a server reports start an equal server.
    assert resolve(one_shot=json.loads(json.dumps(config.to_dict()))["one_shot"]) == config
    assert resolve().one_shot is None and resolve().to_dict()["one_shot"] is None


@pytest.mark.parametrize(
    "wrong", ["0", "16", "64", "0.5x", "65x", "100x", "x", "much", "-4x", "1e3x", "16.5", True, ["16x"]]
)
def test_invalid_values_are_rejected(wrong):
    with pytest.raises(ConfigError) as e:
        resolve(one_shot=wrong)
    assert one_sentence(str(e.value)).startswith("--kvc-one-shot") and "custom_params" not in str(e.value)


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "leankv"}, {"policy": "quota"}, {"policy": "prune"}, {"window": 64}, {"high": "bf16"},
        {"high": "bf16", "levels": "k4v4"}, {"allow_one_shot": "false"}, {"policy": "safe", "allow_one_shot": "False"},
    ],
)  # fmt: skip
def test_server_without_one_shot_prompts_is_rejected(options):
    resolve(**options)
    with pytest.raises(ConfigError) as e:
        resolve(**options, one_shot="16x")
    sentence = one_sentence(str(e.value))
    assert "because one-shot prompts need policy quantize" in sentence and "or drop --kvc-one-shot" in sentence


@pytest.mark.parametrize("options", [{}, {"policy": "safe"}, {"policy": "balanced", "floor": "k2v2"}, {"high": "k2v2"}])
def test_policies_that_keep_all_tokens_are_served(options):
    for value in ("16x", "1024"):
        check_facts(ModelFacts("LlamaForCausalLM"), resolve(**options, one_shot=value))


def test_model_with_sliding_windows_is_rejected(parse):
    config = resolve(one_shot="16x")
    windowed = ModelFacts("Gemma2ForCausalLM", windows=(1024,))
    check_facts(windowed, resolve())
    with pytest.raises(ConfigError, match="sliding windows, which need") as e:
        check_facts(windowed, config)
    assert one_sentence(str(e.value)).startswith("--kvc-one-shot")
    check_model(configurator(parse, "--kvc-one-shot", "16x"))
    with pytest.raises(ConfigError, match="sliding windows"):
        check_model(configurator(parse, "--kvc-one-shot", "16x", layer={"sliding_window_size": 63}))


def test_pages_that_do_not_divide_blocks_are_rejected():
    facts = ModelFacts("LlamaForCausalLM", head_dim=64, v_head_dim=64)
    check_facts(facts, resolve(page_bytes=3456))
    with pytest.raises(ConfigError, match="do not divide blocks") as e:
        check_facts(facts, resolve(page_bytes=3456, one_shot="16x"))
    one_sentence(str(e.value))


@pytest.mark.parametrize("high", ["k8v8", "k8v4", "k4v4", "k2v2"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_ratio_that_the_format_alone_meets_is_rejected(high, head_dim):
    """The smallest useful ratio is that of a block in the format, with all metadata."""
    facts, config = ModelFacts("LlamaForCausalLM", head_dim=head_dim, v_head_dim=head_dim), resolve(high=high)
    layout = make_layout(config, make_policy(config), layers=3, heads=2, head_dim=head_dim)
    pages = make_policy(config).block_formats(layout)[1].pages
    block = pages * (layout.page_bytes + RING_ENTRY_BYTES) + layout.block_meta_bytes
    ratio = 4 * 3 * 2 * head_dim * layout.block_tokens / block
    check_facts(facts, resolve(high=high, one_shot=f"{ratio * 1.02:.2f}x"))
    with pytest.raises(ConfigError, match="has no effect") as e:
        check_facts(facts, resolve(high=high, one_shot=f"{ratio * 0.98:.2f}x"))
    assert high in one_sentence(str(e.value))


def test_command_line_refuses_in_one_sentence(parse, capsys):
    assert resolve_config(parse("--kv-backend", "kvc", "--kvc-one-shot", "16x")).one_shot == Budget(ratio=16)
    for options in (["100x"], ["16x", "--kvc-window", "64"], ["2x"]):
        with pytest.raises(SystemExit) as e:
            parse("--kv-backend", "kvc", "--kvc-one-shot", *options)
        assert e.value.code == 2
        assert "--kvc-one-shot" in one_sentence(capsys.readouterr().err.strip().splitlines()[-1])


def test_start_warns_about_prefix_cache(parse, monkeypatch):
    def warnings(*options) -> list[str]:
        messages = []
        monkeypatch.setattr(start.logger, "warning", messages.append)
        parse("--kv-backend", "kvc", *options)
        return [m for m in messages if "--kvc-one-shot" in m]

    (warning,) = warnings("--kvc-one-shot", "16x", "--kvc-high", "k8v4")
    assert "one-shot:16x" in one_sentence(warning) and "no cached prefix" in warning and '{"kvc": "k8v4"}' in warning
    assert warnings() == warnings("--kvc-one-shot", "16x", "--disable-radix-cache") == []
    assert one_shot_warning(KvcConfig()) is None
