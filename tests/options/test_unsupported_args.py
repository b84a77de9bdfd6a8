"""Every refused option is named in one sentence, and its refusal reads a field that exists in SGLang."""

from __future__ import annotations

import json
from types import SimpleNamespace

import msgspec
import pytest

from sglang_kvc.errors import ConfigError
from sglang_kvc.options.config import KvcConfig
from sglang_kvc.options.conflicts import (
    check_chunk,
    check_disk,
    check_dp_attention,
    check_eviction,
    check_hierarchical,
    check_host_memory,
    check_host_size,
    check_memory,
    check_memory_saver,
    check_paged_experts,
    check_running_share,
    check_storage,
    host_memory_of,
    ranks_per_host,
)
from sglang_kvc.options.resolve import resolve_config
from sglang_kvc.options.start import _check_storage
from sglang_kvc.options.start_warnings import TREE_CORE, environment_warnings, ignored_warnings, order_warning
from sglang_kvc.options.unsupported_args import (
    AFTER_CAPTURE,
    ARG_REFUSALS,
    STORAGE_BACKENDS,
    check_args,
    check_capability,
)

from .conftest import one_sentence

REFUSED = {
    "speculative_algorithm": "EAGLE",
    "hicache_storage_backend": "sim",
    "enable_lmcache": True,
    "enable_flexkv": True,
    "enable_hisparse": True,
    "enable_unified_cache_external_linker": True,
    "enable_unified_memory": True,
    "disaggregation_mode": "prefill",
    "pp_size": 2,
    "dcp_size": 2,
    "attn_cp_size": 2,
    "enable_nvidia_megakernel": True,
    "enable_amd_monokernel": True,
    "enable_two_batch_overlap": True,
    "enable_pdmux": True,
    "dllm_algorithm": "LowConfidence",
    "enable_deterministic_inference": True,
    "rl_on_policy_target": "fsdp",
    "kv_cache_dtype": "fp8_e4m3",
    "attention_backend": "flashinfer",
    "prefill_attention_backend": "fa3",
    "decode_attention_backend": "triton",
    "radix_cache_backend": "other",
    "cuda_graph_backend_prefill": "full",
    "dwdp_size": 2,
    "kv_canary": "raise",
    "prefill_only_disable_kv_cache": True,
    "enable_mis": True,
    "dtype": "float32",
    "device": "npu",
}


@pytest.fixture(scope="module")
def stock():
    """The fields of a ServerArgs with stock defaults that the refusals read."""
    from sglang_kvc.options.server_args import KvcServerArgs

    fields = msgspec.structs.fields(KvcServerArgs)
    return {f.name: None if f.default is msgspec.NODEFAULT else f.default for f in fields}


def test_list_of_refusals_is_complete():
    assert set(REFUSED) == {r.name for r in ARG_REFUSALS}


def test_stock_defaults_pass(stock):
    check_args(SimpleNamespace(**stock), KvcConfig())


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_unsupported_arguments_are_rejected(stock, name):
    assert name in stock, f"{name} is no field of SGLang's ServerArgs"
    with pytest.raises(ConfigError) as e:
        check_args(SimpleNamespace(**{**stock, name: REFUSED[name]}), KvcConfig())
    sentence = one_sentence(str(e.value))
    assert "--" + name.replace("_", "-") in sentence and "because" in sentence and ";" in sentence


@pytest.mark.parametrize(
    "changes",
    [
        {"page_size": 64},
        {"chunked_prefill_size": 100},
        {"max_total_tokens": 4096},
        {"cuda_graph_config": {"prefill": {"backend": "full"}}},
        {"enable_streaming_session": True, "disable_radix_cache": True},
        {"enable_streaming_session": True, "strip_thinking_cache": True},
    ],
    ids=lambda c: next(iter(c)),
)
def test_contradicting_arguments_are_rejected(stock, changes):
    with pytest.raises(ConfigError) as e:
        check_args(SimpleNamespace(**{**stock, **changes}), KvcConfig(memory=10**9))
    assert "--" + next(iter(changes)).replace("_", "-") in one_sentence(str(e.value))


@pytest.mark.parametrize(
    "changes",
    [
        {"page_size": 128},
        {"chunked_prefill_size": 512},
        {"chunked_prefill_size": -1},
        {"cuda_graph_config": {"decode": {"backend": "full"}}},
        {"cuda_graph_config": {"prefill": {"backend": "breakable"}}},
        {"cuda_graph_backend_prefill": "breakable"},
        {"cuda_graph_backend_prefill": "disabled"},
        {"kv_cache_dtype": "bfloat16"},
        {"dtype": "half"},
        {"tp_size": 2},
        {"dp_size": 2},
        {"disable_radix_cache": True},
        {"enable_lora": True},
        {"enable_mixed_chunk": True},
        {"enable_single_batch_overlap": True},
        {"quantization_param_path": "scales.json"},
        {"enable_return_indexer_topk": True},
        {"enable_session_radix_cache": True},
        {"enable_pd_role_switch": True},
        {"enable_prefill_cp": True, "cp_strategy": "zigzag"},
        {"enable_return_routed_experts": True},
        {"enable_torch_compile": True},
        {"radix_eviction_policy": "slru"},
        {"prefill_decode_interval": 4},
        {"cuda_graph_max_seq_len_prefill": 4096},
        {"enable_paged_experts": True},
        {"enable_layernorm_sp": True},
        {"enable_watermark": True},
        {"startup_weight_load_mode": "overlap"},
    ],
    ids=str,
)
def test_supported_arguments_pass(stock, changes):
    check_args(SimpleNamespace(**{**stock, **changes}), KvcConfig())


@pytest.mark.parametrize(
    ("option", "needs"),
    [
        ("--enable-kv-cache-sharding", "PD prefill"),
        ("--enable-page-major-kv-layout", "--enable-unified-memory"),
        ("--disaggregation-decode-enable-offload-kvcache", "decode side"),
    ],
)
def test_sglang_rejects_dependent_options_by_itself(parse, option, needs):
    with pytest.raises((ValueError, AssertionError), match=needs):
        parse("--kv-backend", "kvc", option)


def test_context_parallel_prefill_on_one_rank_has_no_effect(parse):
    from sglang.srt.layers.cp import base

    parse("--kv-backend", "kvc", "--enable-prefill-cp", "--cp-strategy", "zigzag")
    assert base._STRATEGY is None


def test_returned_experts_conflict_with_blocks_that_change_slots(stock):
    args = SimpleNamespace(**{**stock, "enable_return_routed_experts": True})
    check_args(args, KvcConfig())
    with pytest.raises(ConfigError) as e:
        check_args(args, KvcConfig(host_memory=10**9))
    assert "--kvc-host-memory" in one_sentence(str(e.value))


@pytest.mark.parametrize("scorer", ["expected-attention", "dapq", "cake", "gate", "compresskv"])
def test_head_statistics_are_rejected_with_tensor_parallelism(stock, scorer):
    config = KvcConfig(policy="prune", scorer=scorer, calibration="statistics.safetensors")
    check_args(SimpleNamespace(**stock), config)
    with pytest.raises(ConfigError) as e:
        check_args(SimpleNamespace(**{**stock, "tp_size": 2}), config)
    assert "--tp-size 2" in one_sentence(str(e.value))
    by_layer = KvcConfig(policy="prune", share="xkv", calibration="statistics.safetensors")
    check_args(SimpleNamespace(**{**stock, "tp_size": 2}), by_layer)


def test_memory_beyond_device_is_rejected():
    config = KvcConfig(memory=10**12)
    check_memory(config, None)
    check_memory(KvcConfig(), 10**9)
    with pytest.raises(ConfigError) as e:
        check_memory(config, 8e10)
    assert "--kvc-memory" in one_sentence(str(e.value))


def test_ignored_arguments_are_reported(stock):
    assert ignored_warnings(SimpleNamespace(**stock), cpu=True) == []
    for name, value in (("quantization_param_path", "scales.json"), ("enable_return_indexer_topk", True)):
        (warning,) = ignored_warnings(SimpleNamespace(**{**stock, name: value}), cpu=False)
        assert "--" + name.replace("_", "-") in one_sentence(warning)
    compiled = SimpleNamespace(**{**stock, "enable_torch_compile": True})
    assert ignored_warnings(compiled, cpu=False) == []
    assert "--enable-torch-compile" in one_sentence(ignored_warnings(compiled, cpu=True)[0])


def test_host_memory_options_of_hierarchical_cache_are_checked(stock):
    args = {**stock, "enable_hierarchical_cache": True}
    assert host_memory_of(SimpleNamespace(**{**args, "hicache_size": 64})) == "64GB"
    for changes in ({}, {"hicache_ratio": 2.0}):
        with pytest.raises(ConfigError) as e:
            host_memory_of(SimpleNamespace(**{**args, **changes}))
        assert "--kvc-host-memory" in one_sentence(str(e.value))
    (warning,) = ignored_warnings(SimpleNamespace(**{**args, "hicache_write_policy": "write_back"}), cpu=False)
    assert "--hicache-write-policy" in one_sentence(warning)


@pytest.mark.parametrize(
    "host_memory, changes, named",
    [
        (0, {"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
        (8 * 10**9, {"hicache_size": 64}, "--hicache-size 64"),
        (8 * 10**9, {"hicache_host_memory_mode": "buffer_only"}, "--hicache-host-memory-mode"),
    ],
)
def test_host_memory_conflicts_with_hierarchical_cache(stock, host_memory, changes, named):
    config = KvcConfig(host_memory=host_memory)
    check_hierarchical(config, SimpleNamespace(**stock))
    for num_bytes, size in ((64 * 10**9, 64), (15 * 10**8, 1.5), (15 * 10**8, 2)):
        check_hierarchical(KvcConfig(host_memory=num_bytes), SimpleNamespace(**{**stock, "hicache_size": size}))
    with pytest.raises(ConfigError) as e:
        check_hierarchical(config, SimpleNamespace(**{**stock, **changes}))
    assert named in one_sentence(str(e.value))


def test_host_memory_of_all_ranks_must_fit(stock):
    ranks = [
        ranks_per_host(SimpleNamespace(**{**stock, "tp_size": 8, **changes}))
        for changes in ({}, {"nnodes": 2}, {"dp_size": 2}, {"dp_size": 2, "enable_dp_attention": True})
    ]
    assert ranks == [8, 4, 16, 8]
    config = KvcConfig(host_memory=64 * 10**9)
    check_host_size(config, 8, 512e9)
    with pytest.raises(ConfigError) as e:
        check_host_size(config, 8, 500e9)
    assert "64 GB on each of 8 ranks" in one_sentence(str(e.value)) and "--kvc-host-memory" in str(e.value)


def test_running_share_needs_prefix_cache():
    for cached in (True, False):
        check_running_share(KvcConfig(), SimpleNamespace(disable_radix_cache=not cached))
    check_running_share(KvcConfig(running_share=0.5), SimpleNamespace(disable_radix_cache=False))
    with pytest.raises(ConfigError) as e:
        check_running_share(KvcConfig(running_share=0.5), SimpleNamespace(disable_radix_cache=True))
    assert "--kvc-running-share" in one_sentence(str(e.value))


@pytest.mark.parametrize("changes", [{"disable_radix_cache": True}, {"radix_eviction_policy": "slru"}])
def test_eviction_reuse_conflicts_with_other_orders(changes):
    args = {"disable_radix_cache": False, "radix_eviction_policy": "lru"}
    check_eviction(KvcConfig(eviction="reuse"), SimpleNamespace(**args))
    check_eviction(KvcConfig(), SimpleNamespace(**{**args, **changes}))
    with pytest.raises(ConfigError) as e:
        check_eviction(KvcConfig(eviction="reuse"), SimpleNamespace(**{**args, **changes}))
    assert "--kvc-eviction reuse" in one_sentence(str(e.value))
    assert "--" + next(iter(changes)).replace("_", "-") in str(e.value)


def test_host_memory_without_prefix_cache_is_rejected():
    check_host_memory(KvcConfig(), True)
    check_host_memory(KvcConfig(host_memory=10**9), False)
    with pytest.raises(ConfigError) as e:
        check_host_memory(KvcConfig(host_memory=10**9), True)
    assert "--disable-radix-cache" in one_sentence(str(e.value))


def test_dp_attention_rejects_options_that_depend_on_other_ranks(stock):
    for given in ({"enable_dp_attention": True}, {"attn_dp_size": 2}):
        args = SimpleNamespace(**{**stock, **given})
        check_args(args, KvcConfig(host_memory=10**9))
        check_dp_attention(args, KvcConfig(policy="quota"))
        for config, named in (
            (KvcConfig(disk="x"), "--kvc-disk"),
            (KvcConfig(storage="file"), "--hicache-storage-backend"),
            (KvcConfig(policy="leankv"), "leankv"),
        ):
            with pytest.raises(ConfigError) as e:
                check_dp_attention(args, config)
            sentence = one_sentence(str(e.value))
            assert "--enable-dp-attention" in sentence and named in sentence


def test_memory_saver_conflicts_are_rejected():
    check_memory_saver(KvcConfig(host_memory=10**9), True, cpu=False)
    check_memory_saver(KvcConfig(disk="x"), False, cpu=True)
    for config, cpu, named in (
        (KvcConfig(), True, "on the CPU"),
        (KvcConfig(disk="x"), False, "--kvc-disk"),
        (KvcConfig(storage="file"), False, "--hicache-storage-backend"),
    ):
        with pytest.raises(ConfigError) as e:
            check_memory_saver(config, True, cpu=cpu)
        sentence = one_sentence(str(e.value))
        assert "--enable-memory-saver" in sentence and named in sentence


def test_experts_in_host_memory_cannot_name_records():
    check_paged_experts(KvcConfig(host_memory=10**9), True)
    check_paged_experts(KvcConfig(disk="x"), False)
    stores = {"--kvc-disk": KvcConfig(disk="x"), "--hicache-storage-backend": KvcConfig(storage="file")}
    for named, config in stores.items():
        with pytest.raises(ConfigError) as e:
            check_paged_experts(config, True)
        sentence = one_sentence(str(e.value))
        assert "--enable-paged-experts" in sentence and named in sentence


def test_files_without_required_options_are_rejected(tmp_path):
    check_disk(KvcConfig())
    check_disk(KvcConfig(host_memory=10**9, disk=str(tmp_path / "new" / "folder"), disk_size=10**9))
    (tmp_path / "file").touch()
    for config, named in (
        (KvcConfig(disk=str(tmp_path)), "--kvc-host-memory"),
        (KvcConfig(disk_size=10**9), "--kvc-disk"),
        (KvcConfig(host_memory=10**9, disk=str(tmp_path / "file")), "--kvc-disk"),
    ):
        with pytest.raises(ConfigError) as e:
            check_disk(config)
        assert named in one_sentence(str(e.value))


def test_storage_backends_without_required_options_are_rejected(stock):
    check_storage(KvcConfig())
    check_storage(KvcConfig(host_memory=10**9, storage="file"))
    for config, named in (
        (KvcConfig(storage="file"), "--kvc-host-memory"),
        (KvcConfig(host_memory=10**9, storage="file", disk="x"), "--kvc-disk"),
    ):
        with pytest.raises(ConfigError) as e:
            check_storage(config)
        assert named in one_sentence(str(e.value))
    for name in STORAGE_BACKENDS:
        args = SimpleNamespace(**{**stock, "hicache_storage_backend": name})
        check_args(args, KvcConfig(host_memory=10**9, storage=name))
        assert resolve_config(args).storage == name
    (warning,) = ignored_warnings(
        SimpleNamespace(**{**stock, "hicache_storage_prefetch_policy": "best_effort"}), cpu=False
    )
    assert "--hicache-storage-prefetch-policy" in one_sentence(warning)


def test_settings_of_storage_backends_are_checked_at_start():
    """Settings that cannot be read or loaded are refused before anything starts."""
    names = {"backend_name": "x", "module_path": "tests.runtime.memory_backend", "class_name": "MemoryBackend"}
    given = {"hicache_storage_backend": "dynamic", "hicache_storage_backend_extra_config": json.dumps(names)}
    _check_storage(SimpleNamespace(**given))
    for extra, named in (
        ("{", "JSON"),
        ("@/nonexistent.json", "nonexistent"),
        (None, "module_path"),
        (json.dumps({**names, "module_path": "nowhere"}), "nowhere"),
        (json.dumps({**names, "class_name": "PLACES"}), "correct"),
    ):
        with pytest.raises(ConfigError) as e:
            _check_storage(SimpleNamespace(**{**given, "hicache_storage_backend_extra_config": extra}))
        assert named in one_sentence(str(e.value))


def test_environment_variables_without_effect_give_warning(monkeypatch):
    from sglang.srt.environ import envs

    monkeypatch.delenv(TREE_CORE, raising=False)
    assert environment_warnings() == [] and hasattr(envs, TREE_CORE)
    monkeypatch.setenv(TREE_CORE, "rust")
    assert TREE_CORE in one_sentence(environment_warnings()[0])


def test_pool_sized_after_capture_is_rejected(parse, monkeypatch, capsys):
    from sglang.srt.environ import envs

    from sglang_kvc.options import start

    assert hasattr(envs, AFTER_CAPTURE)
    monkeypatch.setattr(start, "post_capture_kv_sizing_planned", lambda args: True)
    with pytest.raises(SystemExit):
        parse("--kv-backend", "kvc")
    assert f"{AFTER_CAPTURE}=1" in one_sentence(capsys.readouterr().err.strip().splitlines()[-1])


def test_old_gpus_are_rejected():
    check_capability((8, 0))
    check_capability((12, 0))
    with pytest.raises(ConfigError, match=r"7\.5") as e:
        check_capability((7, 5))
    one_sentence(str(e.value))


@pytest.mark.parametrize("size", ["192", "320"])
def test_block_size_must_divide_chunk(parse, capsys, size):
    with pytest.raises(SystemExit):
        parse("--kv-backend", "kvc", "--kvc-block-size", size)
    sentence = one_sentence(capsys.readouterr().err.strip().splitlines()[-1])
    chunk = sentence.split("choose ")[1].rstrip(".")
    args = parse("--kv-backend", "kvc", "--kvc-block-size", size, "--chunked-prefill-size", chunk)
    assert args.page_size == int(size)


def test_advised_chunk_is_for_all_ranks_of_attention_data_parallelism():
    """SGLang divides the chunk by the number of these ranks before the last check."""
    with pytest.raises(ConfigError, match="--chunked-prefill-size 256 gives each of 4 ranks 64 tokens") as e:
        check_chunk(256 // 4, KvcConfig(), ranks=4)
    advised = int(one_sentence(str(e.value)).split("choose ")[1].rstrip("."))
    assert advised == 512
    check_chunk(advised // 4, KvcConfig(), ranks=4)


def test_order_of_arrival_is_warned_of_with_host_memory():
    assert "--schedule-policy hrrn" in order_warning(KvcConfig(host_memory=1 << 30), "fcfs")
    assert order_warning(KvcConfig(host_memory=1 << 30), "hrrn") is None
    assert order_warning(KvcConfig(), "fcfs") is None
