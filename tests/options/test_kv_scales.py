"""Checkpoints with scales for an FP8 cache are served: scales are ignored, and the pool is sized without them.

The scales are declared in config.json, or only in ModelOpt's hf_quant_config.json, which SGLang reads when it builds
the model.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvc_patches import memory_pool
from sglang_kvc.options import unsupported_models

from .conftest import configurator, one_sentence

BUDGET = 64 << 20
COMPRESSED_TENSORS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {},
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"},
}
MODELOPT = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}}


@pytest.fixture(params=["config.json", "hf_quant_config.json"])
def checkpoint(make_model, request) -> str:
    if request.param == "config.json":
        return make_model(quantization_config=COMPRESSED_TENSORS)
    folder = make_model()
    (Path(folder) / "hf_quant_config.json").write_text(json.dumps(MODELOPT))
    return folder


def test_start_accepts_checkpoint_with_kv_scales(parse, checkpoint):
    assert parse("--kv-backend", "kvc", model_path=checkpoint).attention_backend == "kvc"


def test_built_model_is_served_with_warning(parse, monkeypatch):
    def warnings_for(**changes) -> list[str]:
        config, messages = configurator(parse, **changes), []
        monkeypatch.setattr(unsupported_models.logger, "warning", lambda text, *args: messages.append(text % args))
        unsupported_models.check_model(config)
        return messages

    for changes in (
        {"quant_config": SimpleNamespace(kv_cache_quant_algo="FP8")},  # declared
        {"layer": {"k_scale_float": 0.02}},  # loaded
    ):
        (message,) = warnings_for(**changes)
        assert "KV-cache scales" in one_sentence(message)
    assert not warnings_for()
    assert not warnings_for(quant_config=SimpleNamespace(kv_cache_quant_algo=None), layer={"k_scale_float": 1.0})


@pytest.mark.parametrize("declared", [torch.bfloat16, torch.float8_e4m3fn], ids=["auto", "fp8"])
def test_pool_uses_free_memory_whatever_dtype_is_declared(parse, monkeypatch, declared):
    """SGLang's own configurator sizes the pool from the dtype that it chose for its own cache."""
    import inspect

    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.mem_cache import kv_cache_configurator as module
    from sglang.srt.runtime_context import create_context, use_context

    from sglang_kvc.cache import runtime

    args = parse("--kv-backend", "kvc", "--max-total-tokens", str(1 << 30))  # no --kvc-memory: sized from free memory
    sgl = object.__new__(module.KVCacheConfigurator)
    fields = dict(
        server_args=args, model_config=model_config_of(args), device="cpu", gpu_id=0, is_hybrid_swa=False,
        layer_info=SimpleNamespace(num_effective_layers=2),
        use_mla_backend=False, mambaish_config=None, is_draft_worker=False, model_dtype=torch.bfloat16,
        kv_cache_dtype=declared, kv_cache_dtype_str="fp8_e4m3" if declared.itemsize == 1 else "auto",
        spec_algorithm=SimpleNamespace(
            is_eagle=lambda: False, is_standalone=lambda: False, is_dflash_family=lambda: False
        ),
    )  # fmt: skip
    for name, value in fields.items():
        setattr(sgl, name, value)
    for name, value in {
        "_profile_available_bytes": lambda self, before: BUDGET,
        "_apply_token_constraints": lambda self, tokens: tokens,
        "resolve_max_num_reqs": lambda self, tokens: 8,
    }.items():
        monkeypatch.setattr(module.KVCacheConfigurator, name, value)
    monkeypatch.setattr(memory_pool, "verify", lambda: None)
    monkeypatch.setattr("sglang_kvc.options.unsupported_models.check_model", lambda configurator: None)
    monkeypatch.setattr(runtime, "_current", None)
    orig = inspect.unwrap(module.KVCacheConfigurator._resolve_memory_pool_config)
    with use_context(create_context(args, role="scheduler")):
        memory_pool.before_configure(sgl, pre_model_load_memory=0)
        memory_pool.around_resolve_memory_pool_config(orig, sgl, 0)
    assert 0.9 * BUDGET < runtime.current().store.nbytes <= 1.01 * BUDGET
