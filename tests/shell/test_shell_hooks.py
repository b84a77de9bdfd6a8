"""Contract with SGLang 0.5.17: what the shell hooks into exists, with the signatures that it relies on."""

from __future__ import annotations

import inspect

import pytest

from kvc_patches import internal_state, metrics, registry
from kvc_patches import server_args as patch

from .conftest import one_sentence


def test_hook_targets_have_the_expected_parameters():
    metrics.register()
    internal_state.register()
    ours = [
        f"{metrics.POOL_STATS}.get_prefill_usage_msg_parts",
        f"{metrics.POOL_STATS}.get_decode_usage_msg_parts",
        f"{metrics.COLLECTOR}.log_stats",
        "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
    ]
    for target in ours:
        assert registry.parameters_of(registry.resolve(target)) == registry.HOOKS[target].parameters, target


def test_the_collector_has_what_the_gauges_need():
    collector = registry.resolve(metrics.COLLECTOR)
    assert hasattr(collector, "_gauge_cls")
    assert "self.labels = labels" in inspect.getsource(inspect.unwrap(collector.__init__))


def test_server_args_are_as_the_subclass_expects():
    from sglang.srt.arg_groups.arg_utils import Arg
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES

    from sglang_kvc.args import KvcServerArgs

    stock = KvcServerArgs.__mro__[1]
    assert stock.__name__ == "ServerArgs" and stock.__module__ == "sglang.srt.server_args"
    assert tuple(inspect.signature(stock.__post_init__).parameters) == ("self",)
    assert tuple(inspect.signature(stock.from_cli_args).parameters) == ("args",)
    assert "server_args_class" in vars(Engine) and isinstance(ATTENTION_BACKEND_CHOICES, list)
    assert {"help", "choices", "type_parser"} <= set(inspect.signature(Arg).parameters)


def test_configurator_has_the_fields_that_refusals_read():
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

    read = {"model", "model_config", "model_dtype", "server_args"}
    read |= {"use_mla_backend", "is_hybrid_swa", "mambaish_config"}
    assert read <= set(KVCacheConfigurator.__dataclass_fields__)


def test_another_sglang_is_refused(monkeypatch, capsys):
    patch.check_version()
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.6.0")
    monkeypatch.setattr("sys.argv", ["launch_server", "--model-path", "m"])
    with pytest.raises(patch.UnsupportedSGLang, match=r"0\.6\.0"):
        patch.check_version()  # logged by SGLang, which then serves as if we were not there
    monkeypatch.setattr("sys.argv", ["launch_server", "--kv-backend", "kvc"])
    with pytest.raises(SystemExit) as e:
        patch.check_version()
    assert e.value.code == 2 and "sglang==0.5.17" in one_sentence(capsys.readouterr().err.strip() + ".")


def test_entry_points():
    from importlib.metadata import entry_points

    (plugin,) = [e for e in entry_points(group="sglang.srt.plugins") if e.name == "kvc"]
    (platform,) = [e for e in entry_points(group="sglang.srt.platforms") if e.name == "kvc_cpu"]
    assert plugin.value == "kvc_patches:load"
    assert platform.value == "sglang_kvc.cpu_platform:activate"


class TestCpuPlatform:
    def test_steps_aside_for_an_accelerator(self, monkeypatch):
        import torch

        from sglang_kvc.cpu_platform import activate

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert activate() is None

    def test_activates_without_one(self, monkeypatch):
        import torch

        from sglang_kvc.cpu_platform import activate

        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
        monkeypatch.setattr(torch.version, "hip", None)
        module, name = activate().split(":")
        assert (module, name) == ("sglang_kvc.cpu_platform_class", "TorchCpuPlatform")

    def test_gives_sglang_what_it_asks_for(self):
        from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
        from sglang.srt.platforms.interface import SRTPlatform

        from sglang_kvc.cpu_allocator import TorchPagedAllocator
        from sglang_kvc.cpu_platform_class import TorchCpuPlatform

        platform = TorchCpuPlatform()
        assert isinstance(platform, SRTPlatform) and platform.is_out_of_tree()
        assert platform.get_device(0) == "cpu" and platform.get_dispatch_key_name() == "native"
        assert platform.get_default_attention_backend() == "torch_native"
        assert platform.get_mha_kv_pool_cls().__name__ == "MHATokenToKVPool"
        rest = dict(dtype=None, device="cpu", kvcache=None, need_sort=False)
        assert type(platform.get_paged_allocator_cls()(64, page_size=1, **rest)) is TokenToKVPoolAllocator
        assert type(platform.get_paged_allocator_cls()(64, page_size=16, **rest)) is TorchPagedAllocator
