"""The effect of a calibration file on a server: its defaults, and the errors for formats that it forbids."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from sglang_kvc.calibration.model_fingerprint import Identity, identity_of
from sglang_kvc.calibration.verdicts import KEY, Chosen, Findings, LeastMemory, read
from sglang_kvc.errors import ConfigError
from sglang_kvc.options.config import KvcConfig
from sglang_kvc.options.resolve import resolve_config
from sglang_kvc.options.unsupported_models import ModelFacts, check_facts

from .conftest import one_sentence

MODEL = Identity("LlamaForCausalLM", 2, 4, 2, 64, "0123456789ab")
VERDICTS = {"k8v8": "ok", "k8v4": "ok", "k4v8": "ok", "k4v4": "ok", "k4v2": "loses", "k2v2": "breaks"}
FINDINGS = Findings(
    identity=MODEL,
    settings={"tokens": 2048, "block_size": 128},
    formats=tuple(
        {"format": name, "token_bytes": 1.0, "kl_mean": 0.5, "verdict": verdict} for name, verdict in VERDICTS.items()
    ),
    recommended="k4v2",
    thresholds=Chosen(3.0, 0.06, "k8v4", "k4v2"),
)
LEAST = LeastMemory(0.95, 0.3, 5.5, (0.2, 0.4))


@pytest.fixture
def write(tmp_path):
    """`write(**changes)` -> a file with these findings; `metadata` takes their place."""

    def make(metadata=None, **changes) -> str:
        path = str(tmp_path / f"Calibration-{len(list(tmp_path.iterdir()))}.safetensors")
        tensors = {
            "query_mean": torch.zeros(2, 4, 64),
            "query_covariance": torch.zeros(2, 4, 64, 64),
            "importance_retention": torch.tensor([[0.5, 0.75, 1.0], [0.9, 0.95, 1.0]]),
        }
        save_file(tensors, path, metadata=metadata or replace(FINDINGS, **changes).metadata())
        return path

    return make


def resolve(**options) -> KvcConfig:
    return resolve_config(SimpleNamespace(**{f"kvc_{k}": v for k, v in options.items()}))


def refused(**options) -> str:
    with pytest.raises(ConfigError) as e:
        resolve(**options)
    return one_sentence(str(e.value))


def test_findings_round_trip_through_file(write):
    assert read(write()) == FINDINGS
    assert read(write(least_memory=LEAST)) == replace(FINDINGS, least_memory=LEAST)


def test_least_memory_is_default_of_share_xkv(write):
    file, without = write(least_memory=LEAST), write()
    assert resolve(policy="xkv", calibration=file).keep == 0.3
    assert resolve(policy="prune", scorer="h2o", share="xkv", calibration=file).keep == 0.3
    assert resolve(policy="xkv", calibration=file, keep=0.4).keep == 0.4
    assert resolve(policy="xkv", calibration=file, budget="4x").keep == resolve(policy="xkv", calibration=without).keep
    assert resolve(policy="snapkv", calibration=file).keep == 0.5  # another share


def test_recommended_format_is_default(write):
    file = write()
    assert resolve(calibration=file).high == "k4v2"
    assert resolve(calibration=file, high="k8v8").high == "k8v8"
    assert resolve(calibration=file, policy="snapkv").high == "k8v8"


def test_file_without_packed_format_needs_choice(write):
    none = write(recommended="bf16")
    for options in ({}, {"one_shot": "16x"}, {"floor": "k2v2"}):
        with pytest.raises(ConfigError) as e:
            resolve(calibration=none, **options)
        assert "--kvc-calibration" in one_sentence(str(e.value)) and "--kvc-high" in str(e.value)
    assert resolve(calibration=none, high="k8v8").high == "k8v8"


def test_thresholds_are_defaults_for_their_formats(write):
    file = write()

    def alphas(**options):
        c = resolve(policy="leankv", calibration=file, **options)
        return c.alpha_high, c.alpha_low

    assert alphas() == (3.0, 0.06)
    assert alphas(alpha_high=2) == (2.0, 0.02) and alphas(alpha_low=0.1) == (1.0, 0.1)
    assert alphas(high="k8v8") == (1.0, 0.02)
    assert alphas(high="k8v4", low="k4v2") == (3.0, 0.06)
    never = write(thresholds=Chosen(0.0, 0.0, "k8v4", "k4v2"))
    assert resolve(policy="leankv", calibration=never).alpha_high == 0


@pytest.mark.parametrize(
    "options, words",
    [
        ({"high": "k2v2"}, "--kvc-high k2v2"),
        ({"policy": "leankv", "low": "k2v2"}, "--kvc-low k2v2"),
        ({"policy": "minikv"}, "--kvc-high k2v2"),
        ({"policy": "ada-expected", "high": "k2v2"}, "--kvc-high k2v2"),
    ],
    ids=str,
)
def test_format_that_breaks_model_is_rejected(write, options, words):
    sentence = refused(calibration=write(), **options)
    assert words in sentence and "breaks this model" in sentence and "--kvc-calibration" in sentence
    assert resolve(**{**options, "policy": "quantize", "low": None}).high  # it is served without the file


def test_format_that_only_loses_quality_is_served(write):
    assert resolve(calibration=write(), high="k4v2").high == "k4v2"
    assert resolve(calibration=write(), policy="prune", high="k4v2").high == "k4v2"


def of_version_1(key_mode: str) -> dict[str, str]:
    """Metadata in version 1 of the format: verdicts for both key modes, thresholds for one."""
    record = json.loads(FINDINGS.metadata()[KEY])
    token = [{**r, "key_mode": "token", "verdict": "breaks"} for r in record["formats"]]
    record["formats"] = [{**r, "key_mode": "channel"} for r in record["formats"]] + token
    record["recommended"] = {"channel": record["recommended"], "token": "bf16"}
    record["thresholds"]["key_mode"] = key_mode
    return {KEY: json.dumps({**record, "version": 1})}


def test_findings_of_version_1_are_read(write):
    assert read(write(metadata=of_version_1("channel"))) == FINDINGS
    assert "quantized per token" in refused(calibration=write(metadata=of_version_1("token")))


def test_findings_of_unknown_version_are_rejected(write):
    later = json.dumps({**json.loads(FINDINGS.metadata()[KEY]), "version": 99})
    for text in (later, "{}", "[1]", "no json"):
        assert "another version" in refused(calibration=write(metadata={KEY: text}))


def test_file_without_findings_is_rejected_where_it_has_no_effect(write, tmp_path):
    plain = write(metadata={"format": "pt"})
    for policy in ("quantize", "leankv", "prune"):
        assert "no effect" in refused(policy=policy, calibration=plain)
    assert "cannot be read" in refused(calibration=str(tmp_path / "absent"))
    assert resolve(policy="xkv", calibration=plain).policy == "xkv"


def test_file_of_another_model_is_rejected(write):
    config = resolve(calibration=write())
    check_facts(ModelFacts("LlamaForCausalLM", head_dim=64, v_head_dim=64, identity=MODEL), config)
    for change in ({"layers": 3}, {"kv_heads": 4}, {"fingerprint": "ba9876543210"}, {"architecture": "OtherModel"}):
        facts = ModelFacts("LlamaForCausalLM", head_dim=64, v_head_dim=64, identity=replace(MODEL, **change))
        with pytest.raises(ConfigError) as e:
            check_facts(facts, config)
        assert "was made for" in one_sentence(str(e.value))


def test_calibration_and_server_identify_model_alike(parse, model, make_model, write, capsys):
    """The calibration reads the identity from transformers and the server from SGLang; both must be equal."""
    from transformers import AutoConfig

    file = write(identity=identity_of(AutoConfig.from_pretrained(model)))
    args = parse("--kv-backend", "kvc", "--kvc-calibration", file)
    assert resolve_config(args).high == "k4v2"
    for changes in ({"num_hidden_layers": 3}, {"rope_theta": 500000.0}, {"vocab_size": 999}):
        with pytest.raises(SystemExit):
            parse("--kv-backend", "kvc", "--kvc-calibration", file, model_path=make_model(**changes))
        last = capsys.readouterr().err.strip().splitlines()[-1]
        assert "was made for" in one_sentence(last) and "sglang-kvc calibrate" in last


@pytest.mark.parametrize("kind", ["llama3", "yarn", "longrope", "gemma3"])
def test_identity_depends_on_all_of_the_rotary_embedding(kind):
    """Each parameter changes queries and keys. Numbers may be written as integers or not."""
    shared = {"rope_theta": 10000, "rope_type": kind, "original_max_position_embeddings": 4096, "factor": 8}
    parameters = {
        "llama3": {**shared, "low_freq_factor": 1, "high_freq_factor": 4},
        "yarn": {**shared, "attention_factor": 1, "beta_fast": 32, "beta_slow": 1, "mscale": 1, "mscale_all_dim": 1},
        "longrope": {**shared, "short_factor": [1, 2], "long_factor": [3, 4]},
        "gemma3": {"full_attention": shared, "sliding_attention": {"rope_theta": 10000, "rope_type": "default"}},
    }[kind]

    def fingerprint(value: dict) -> str:
        sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
        return identity_of(SimpleNamespace(**sizes, rope_parameters=value)).fingerprint

    def changed(value):
        """Copies of `value`, each with another number or name."""
        if isinstance(value, dict):
            return [{**value, name: other} for name, old in value.items() for other in changed(old)]
        if isinstance(value, list):
            return [[*value[:i], other, *value[i + 1 :]] for i, old in enumerate(value) for other in changed(old)]
        return [f"{value}2" if isinstance(value, str) else value + 1]

    same = json.loads(json.dumps(parameters), parse_int=float)
    assert fingerprint(same) == fingerprint(parameters)
    others = [fingerprint(other) for other in changed(parameters)]
    assert len({fingerprint(parameters), *others}) == len(others) + 1 > 4
