"""The identity of stored blocks: it differs if anything differs that the blocks' content depends on."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from sglang.srt.configs.model_config import ModelConfig
from transformers import Gemma2Config, GraniteConfig, LlamaConfig, PhiConfig

from kvc_kernels.ops import ScoreSampling
from kvc_patches import weights
from sglang_kvc.adapter import model_identity
from sglang_kvc.adapter.model_identity import (
    OPTIONS,
    adapter_digest,
    model_text,
    weights_digest,
    weights_of_ranks,
)
from sglang_kvc.cache.identity import NO_EFFECT, canonical, identity
from sglang_kvc.cache.one_shot import Budget as PromptBudget
from sglang_kvc.options.config import KvcConfig
from sglang_kvc.policies import Prune
from sglang_kvc.policies.allocation import Uniform
from sglang_kvc.policies.budget import Budget
from sglang_kvc.policies.scorers.expected_attention import ExpectedAttention

from .model import P, ToyServer, make_runtime
from .test_starved import run_ranks

SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 100,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 2048}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}


@pytest.fixture
def text_of(monkeypatch):
    """`text_of(...)` -> the model's part of a server's identity."""

    def text(
        config=None, *, dtype=torch.bfloat16, quantization=None, place=(2, 0), start_layer=0, model=None, facts=None,
        **options
    ):  # fmt: skip
        ranks = SimpleNamespace(attn_tp_size=place[0], attn_tp_rank=place[1])
        monkeypatch.setattr(model_identity, "get_parallel", lambda: ranks)
        config = config or LlamaConfig(**SIZES)
        facts = facts or SimpleNamespace(
            hf_config=config, hf_text_config=config, dtype=dtype, quantization=quantization
        )  # fmt: skip
        runner = SimpleNamespace(
            model_config=facts, model=model or torch.nn.Linear(1, 1), server_args=SimpleNamespace(**options)
        )
        return model_text(runner, start_layer)

    return text


@pytest.mark.parametrize(
    "kind, changed",
    [
        (LlamaConfig, {"rope_theta": 1e6}),
        (LlamaConfig, {"rope_parameters": YARN}),
        (LlamaConfig, {"rope_parameters": {**YARN, "factor": 8.0}}),
        (LlamaConfig, {"rope_parameters": {**YARN, "beta_fast": 16.0}}),
        (LlamaConfig, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        (LlamaConfig, {"rms_norm_eps": 1e-5}),
        (LlamaConfig, {"head_dim": 64}),
        (LlamaConfig, {"num_key_value_heads": 2}),
        (LlamaConfig, {"hidden_act": "gelu"}),
        (LlamaConfig, {"max_position_embeddings": 8192}),
        (LlamaConfig, {"quantization_config": AWQ}),
        (LlamaConfig, {"quantization_config": {**AWQ, "group_size": 64}}),
        (PhiConfig, {"partial_rotary_factor": 0.25}),
        (Gemma2Config, {"attn_logit_softcapping": 30.0}),
        (Gemma2Config, {"query_pre_attn_scalar": 144}),
        (Gemma2Config, {"sliding_window": 1024}),
        (Gemma2Config, {"layer_types": ["full_attention", "sliding_attention"]}),
        (GraniteConfig, {"attention_multiplier": 0.5}),
        (GraniteConfig, {"residual_multiplier": 0.5}),
        (GraniteConfig, {"embedding_multiplier": 2.0}),
    ],
    ids=str,
)
def test_every_field_of_config_counts(text_of, kind, changed):
    texts = [text_of(kind(**{**SIZES, **more})) for more in ({}, {}, changed)]
    assert texts[0] == texts[1] != texts[2]


def test_yarn_settings_differ_from_each_other(text_of):
    scalings = [YARN, {**YARN, "factor": 8.0}, {**YARN, "beta_fast": 16.0}, {**YARN, "attention_factor": 1.0}]
    assert len({text_of(LlamaConfig(**SIZES, rope_parameters=scaling)) for scaling in scalings}) == len(scalings)


def test_names_and_library_do_not_count(text_of):
    config, same = LlamaConfig(**SIZES), LlamaConfig(**SIZES, dtype="float16")
    same._name_or_path, same.transformers_version, same._commit_hash = "elsewhere", "1.2.3", "f00"
    assert text_of(config) == text_of(same)
    config.text_config, same.text_config = LlamaConfig(**SIZES), LlamaConfig(**SIZES, dtype="float16")
    same.text_config._name_or_path = "elsewhere"
    assert text_of(config) == text_of(same)
    same.text_config.rms_norm_eps = 0.5
    assert text_of(config) != text_of(same)


def test_options_that_change_config_change_identity(text_of, tmp_path):
    """The config counts as SGLang resolved it from the model's file and the server's arguments."""
    LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"], max_position_embeddings=4096).save_pretrained(tmp_path)

    def text(**options) -> str:
        return text_of(facts=ModelConfig(str(tmp_path), **{"dtype": "bfloat16", **options}))

    overrides = [{"rope_theta": 1e6}, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, {"rms_norm_eps": 0.1}]
    changed = [text(model_override_args=json.dumps(values)) for values in overrides]
    others = [text(context_length=2048), text(dtype="float16"), text(quantization="fp8")]
    assert text() == text() and len({text(), *changed, *others}) == 7


def test_dtype_quantization_options_and_rank_count(text_of):
    class Other(torch.nn.Linear):
        pass

    changes = [
        {"dtype": torch.float16}, {"quantization": "fp8"}, {"quantization": "w8a8_int8"}, {"place": (2, 1)},
        {"place": (4, 0)}, {"start_layer": 1}, {"model": Other(1, 1)},
        *({name: "changed"} for name in OPTIONS if name != "quantization"),
    ]  # fmt: skip
    assert len({text_of(), *(text_of(**change) for change in changes)}) == 1 + len(changes)
    assert text_of(port=1) == text_of(port=2)


def test_option_names_exist_in_sglang():
    from sglang.srt.server_args import ServerArgs

    assert {name for name in OPTIONS if not hasattr(ServerArgs(model_path="x"), name)} == set()


def test_model_and_weights_count():
    runtime = make_runtime()
    first = identity(runtime)
    runtime.model = lambda: "other"
    second = identity(runtime)
    runtime.weights = lambda: b"other"
    assert len({first, second, identity(runtime)}) == 3


CHANGES = {
    "policy": "quota", "high": "k8v4", "low": "k2v2", "window": 64, "block_size": 2 * P, "keep": 0.25,
    "alpha_high": 0.5, "alpha_low": 0.5, "observe": ScoreSampling(window=32), "page_bytes": 4608,
    "budget": Budget(ratio=4), "scorer": ExpectedAttention(), "share": Uniform(), "sinks": 4,
    "levels": ("k8v8",), "floor": "k2v2", "lag": 64,
    "memory": 1 << 30, "host_memory": 1 << 30, "disk": "elsewhere", "disk_size": 1 << 30, "storage": "file",
    "eviction": "reuse", "trust": "all", "allow_lossless": False, "allow_one_shot": False, "running_share": 0.5,
    "one_shot": PromptBudget(ratio=16), "calibration": None,
}  # fmt: skip


@pytest.mark.parametrize("name", [f.name for f in fields(KvcConfig)])
def test_every_setting_that_changes_blocks_counts(name):
    """Also one that this policy does not read."""
    runtime = make_runtime(policy="prune")
    before = identity(runtime)
    assert name == "calibration" or CHANGES[name] != getattr(runtime.config, name)
    runtime.config = replace(runtime.config, **{name: CHANGES[name]})
    assert (identity(runtime) != before) == (name not in NO_EFFECT)


def test_default_budget_keeps_identity():
    """Blocks of its prompts are private, so stored blocks serve servers with and without it."""
    assert identity(make_runtime(window=0, one_shot=PromptBudget(ratio=16))) == identity(make_runtime(window=0))


@pytest.mark.parametrize(
    "options",
    [{"high": "k8v4"}, {"floor": "k2v2"}, {"levels": ("k8v8",)}, {"page_bytes": 2304}, {"policy": "quota"}],
    ids=str,
)
def test_formats_and_layout_count(options):
    assert identity(make_runtime(**options)) != identity(make_runtime())


def test_block_size_dtype_and_device_count():
    runtime = make_runtime()
    seen = {identity(runtime)}
    runtime.store.dtype = torch.float16
    seen.add(identity(runtime))
    runtime.layout = replace(runtime.layout, block_tokens=2 * P)
    seen.add(identity(runtime))
    runtime.store = SimpleNamespace(
        block_formats=runtime.store.block_formats, dtype=torch.float16, device=torch.device("cuda")
    )
    assert len({*seen, identity(runtime)}) == 4


@pytest.mark.parametrize(
    "options, digest",
    [
        ({}, "a7edcfd082caa55608e70b51601a76709f312456b0874fbb64a43e5fbdfaf087"),
        (
            {"policy": "leankv", "high": "k8v4", "low": "k4v2"},
            "f34a28d272bd672515f4cdba71ef92cb3917cdbf819828159f341c71376b0d5e",
        ),
        ({"policy": "kv-compress"}, "9c361a2c5387a3092810aa531125eeb9c3a61f6258b55aeeeecc0b13713a14ba"),
    ],
)
def test_identity_is_that_of_earlier_servers(options, digest):
    """If a digest changes, no server finds blocks that an earlier one stored. Where that is intended, the changelog
    says so. VERSION rises only with records or the arithmetic of packing."""
    assert identity(make_runtime(**options)).hex() == digest


@pytest.mark.parametrize("scorer, changed", [("snapkv", True), ("h2o", False)])
def test_blocks_planned_by_last_queries_of_each_chunk_are_not_found(scorer, changed, monkeypatch):
    """Earlier servers planned blocks of chunked prompts by these queries, if only last ones counted."""
    options = {"policy": "prune", "scorer": scorer}
    before = identity(make_runtime(**options))
    monkeypatch.setattr(Prune, "counts_last_queries", False)
    assert (identity(make_runtime(**options)) != before) == changed


def test_version_of_records_counts(monkeypatch):
    before = identity(make_runtime())
    monkeypatch.setattr("sglang_kvc.cache.identity.VERSION", 10**6)
    assert identity(make_runtime()) != before


def test_calibration_counts_as_it_was_at_start(tmp_path):
    """By its content, not its path. A file that is replaced or removed while the server runs changes nothing."""
    old, same, new = (str(tmp_path / name) for name in ("old", "same", "new"))
    for path, value in ((old, 1.0), (same, 1.0), (new, 2.0)):
        save_file({"attention_entropy": torch.full((2,), value)}, path)

    def server(path):
        return make_runtime(policy="leankv", high="k8v4", low="k4v2", calibration=path)

    runtime = server(old)
    before = identity(runtime)
    assert before == identity(server(same)) and len({before, identity(server(new)), identity(server(None))}) == 3
    save_file({"attention_entropy": torch.full((2,), 3.0)}, old)
    assert identity(runtime) == before != identity(server(old))
    (tmp_path / "old").unlink()
    assert identity(runtime) == before


def test_canonical_text_is_equal_in_every_process():
    class Odd:
        pass

    value = {"b": {"x", "y", "z"}, 1: (1.5, None, torch.bfloat16), "o": Odd(), "f": test_model_and_weights_count}
    assert canonical(value) == canonical({key: value[key] for key in reversed(value)})
    assert " at 0x" not in canonical(value) and canonical(Odd()) == canonical(Odd())
    assert canonical({"a": 1}) != canonical({"a": "1"})
    code = "from sglang_kvc.cache.identity import canonical; print(canonical({'a', 'b', 'c', 'd', 'e'}))"
    runs = [
        subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
                       capture_output=True, text=True, check=True).stdout
        for seed in "12"
    ]  # fmt: skip
    assert runs[0] == runs[1]


# ---- weights


class Weights(torch.nn.Module):
    def __init__(self):
        super().__init__()
        gen = torch.Generator().manual_seed(0)
        self.experts = torch.nn.Parameter(torch.randn((8, 64, 48), generator=gen).bfloat16(), requires_grad=False)
        self.transposed = torch.nn.Parameter(torch.randn((48, 64), generator=gen).t(), requires_grad=False)
        self.codes = torch.nn.Parameter(torch.arange(999, dtype=torch.int32), requires_grad=False)
        self.eight = torch.nn.Parameter(torch.ones(7).to(torch.float8_e4m3fn), requires_grad=False)
        self.one = torch.nn.Parameter(torch.tensor(1.0), requires_grad=False)
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("cos_sin_cache", torch.ones(3), persistent=False)


@pytest.fixture(params=["_crcs", "_sums"])
def checksums(request, monkeypatch):
    """The checksums of CPUs and of GPUs, the latter in several pieces."""
    monkeypatch.setattr(model_identity, "ROW", 64)
    monkeypatch.setattr(model_identity, "PIECE", 7)
    monkeypatch.setattr(model_identity, "_checksums", getattr(model_identity, request.param))


@pytest.mark.parametrize("name", ["experts", "transposed", "codes", "one", "scale"])
def test_single_changed_element_changes_digest(checksums, name):
    """Wherever it is."""
    model = Weights()
    flat, before = getattr(model, name).data.view(-1) if name != "transposed" else None, weights_digest(model)
    flat = model.transposed.data.t().view(-1) if flat is None else flat
    assert weights_digest(Weights()) == before
    for i in {0, 1, len(flat) // 3, len(flat) - 2, len(flat) - 1} & set(range(len(flat))):
        old = flat[i].clone()
        flat[i] += 1
        assert weights_digest(model) != before
        flat[i] = old
    assert weights_digest(model) == before


def _rank(rank: int, pipe, file: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    group = SimpleNamespace(world_size=2, cpu_group=dist.group.WORLD)
    model_identity.get_parallel = lambda: SimpleNamespace(tp_group=group)
    model, digests = torch.nn.Linear(2, 2), []
    for weight in (1.0, 1.0 + rank, 1.0):  # the second weights differ on the second rank only
        torch.nn.init.constant_(model.weight, weight)
        torch.nn.init.zeros_(model.bias)
        digests.append(weights_of_ranks(model))
    assert digests[0] == digests[2] != digests[1]


def test_weights_of_all_ranks_count(tmp_path):
    """Hidden states are summed over the ranks, so the K and V of a rank depend on the weights of all."""
    run_ranks(_rank, str(tmp_path / "store"))


def test_order_shape_and_dtype_of_weights_count(checksums):
    digests = {weights_digest(Weights())}
    changes = (
        lambda x: x.flip(0), lambda x: x.flip(2), lambda x: x.view(8, 48, 64), lambda x: x.view(torch.float16)
    )  # fmt: skip
    for change in changes:
        model = Weights()
        model.experts.data = change(model.experts.data).contiguous()
        digests.add(weights_digest(model))
    assert len(digests) == 5


def test_buffers_that_grow_with_requests_do_not_count():
    model, before = Weights(), weights_digest(Weights())
    model.cos_sin_cache = torch.ones(99)
    assert weights_digest(model) == before


# ---- weights that change while the server runs


@pytest.fixture
def runtime(monkeypatch):
    runtime = make_runtime()
    monkeypatch.setattr("sglang_kvc.cache.runtime._current", runtime)
    return runtime


def test_update_counts_from_its_first_call_until_flush(runtime):
    """Also if it fails later, because some weights may have changed."""
    session = SimpleNamespace(_session=SimpleNamespace(loaded_weights=True))
    weights.before_end(session, None)
    assert not runtime.weights_changed
    weights.before_update(session, None)
    assert runtime.weights_changed
    runtime.reset()
    assert not runtime.weights_changed


def test_session_without_calls_changes_weights_until_it_ends(runtime):
    session = SimpleNamespace(_session=SimpleNamespace(loaded_weights=False))
    weights.before_update(session, None)
    runtime.reset()
    weights.before_end(session, None)
    assert runtime.weights_changed


@pytest.mark.parametrize("name, session", [
    ("update_weights_from_tensor", None), ("update_weights_from_distributed", None), ("begin_weight_update", object()),
])  # fmt: skip
def test_refused_update_changes_nothing(runtime, name, session):
    """SGLang wants updates between `begin_weight_update` and `end_weight_update`."""
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    manager = SchedulerWeightUpdaterManager.__new__(SchedulerWeightUpdaterManager)
    manager._session = session
    weights.UPDATES[name](manager, None)
    assert not getattr(SchedulerWeightUpdaterManager, name)(manager, None).success and not runtime.weights_changed
    manager._session = None if session else object()
    weights.UPDATES[name](manager, None)
    assert runtime.weights_changed


@pytest.mark.parametrize("action", ["snapshot", "compare", "checksum", "reset_tensors"])
def test_check_that_overwrites_weights_changes_them(runtime, action):
    """`/weights_checker` can fill the weights with random numbers, to test an update."""
    weights.UPDATES["check_weights"](SimpleNamespace(), SimpleNamespace(action=action))
    assert runtime.weights_changed == (action == "reset_tensors")


def test_every_call_that_updates_weights_is_hooked():
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    calls = {name for name in dir(SchedulerWeightUpdaterManager) if name.startswith("update_weights")}
    assert {*calls, "begin_weight_update", "check_weights"} == set(weights.UPDATES)


# ---- adapters


def lora(value: float = 1.0, **config) -> SimpleNamespace:
    tensors = {"q_proj.lora_A.weight": torch.full((4, 8), value), "q_proj.lora_B.weight": torch.ones(8, 4)}
    return SimpleNamespace(
        layers=[SimpleNamespace(weights=tensors), SimpleNamespace(weights={})], embedding_layers={},
        added_tokens_embeddings={}, scaling=2.0, config=SimpleNamespace(hf_config={"r": 4, **config}),
    )  # fmt: skip


def test_adapters_differ_by_weights_and_config():
    other_layer, scaled = lora(), lora()
    other_layer.layers.reverse()
    scaled.scaling = 1.0
    digests = [adapter_digest(x) for x in (lora(), lora(2.0), lora(use_rslora=True), other_layer, scaled)]
    assert len(set(digests)) == 5 and adapter_digest(lora()) == digests[0]


@pytest.mark.parametrize("disk", [False, True])
def test_requests_of_changed_adapter_have_other_keys(monkeypatch, tmp_path, disk):
    """SGLang derives the id of an adapter of `--lora-paths` from its name and path."""
    from sglang.srt.mem_cache.events import KvEventLoraNames

    from kvc_patches.requests import before_add_request_to_queue

    options = {"host_memory": 200_000, "disk": str(tmp_path), "disk_size": 1 << 20} if disk else {}
    server = ToyServer(**options)
    monkeypatch.setattr("sglang_kvc.cache.runtime.current", lambda: server.runtime)

    def key(adapter, salt="", lora_id="f00") -> str:
        req = SimpleNamespace(
            sampling_params=SimpleNamespace(custom_params=None), lora_id=lora_id,
            extra_key=(salt + (lora_id or "")) or None, positional_embed_overrides=None, to_finish=True,
        )  # fmt: skip
        manager = SimpleNamespace(loras={"f00": adapter})
        worker = SimpleNamespace(model_runner=SimpleNamespace(lora_manager=manager))
        names = KvEventLoraNames()
        if lora_id:
            names.register(req, "the adapter")  # as SGLang does before it queues the request
        before_add_request_to_queue(SimpleNamespace(tp_worker=worker, kv_event_lora_names=names), req)
        assert names.get(req.extra_key) == ("the adapter" if lora_id else None)
        return req.extra_key

    assert key(lora()) == key(lora()) and key(lora()).endswith("f00")
    assert (key(lora()) != key(lora(2.0))) == disk and key(lora(), "salt") != key(lora())
    assert key(lora(), lora_id=None) is None
