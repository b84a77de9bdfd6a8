"""Contract with SGLang: attributes and signatures that the hooks and the server options rely on."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch

from kvc_patches import metrics, registry
from kvc_patches import server_args as patch
from sglang_kvc.cpu.platform import activate
from sglang_kvc.errors import ConfigError
from tests.options.conftest import one_sentence

INSTALL = f"pip install sglang=={registry.SGLANG_VERSION}"
PLATFORM_CLASS = "sglang_kvc.cpu.platform_class:TorchCpuPlatform"


def test_collector_has_fields_that_gauges_need():
    collector = registry.resolve(metrics.COLLECTOR)
    assert hasattr(collector, "_gauge_cls")
    assert "self.labels = labels" in inspect.getsource(inspect.unwrap(collector.__init__))


def test_server_args_match_subclass():
    from sglang.srt.arg_groups.arg_utils import Arg
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES

    from sglang_kvc.options.server_args import KvcServerArgs

    stock = KvcServerArgs.__mro__[1]
    assert stock.__name__ == "ServerArgs" and stock.__module__ == "sglang.srt.server_args"
    assert tuple(inspect.signature(stock.resolve_once).parameters) == ("self",)
    assert {"_resolution_finished", "_resolution_failed"} <= set(stock.resolve_once.__code__.co_names)
    assert tuple(inspect.signature(stock.from_cli_args).parameters) == ("args",)
    assert "server_args_class" in vars(Engine) and isinstance(ATTENTION_BACKEND_CHOICES, list)
    assert {"help", "choices", "type_parser"} <= set(inspect.signature(Arg).parameters)


def test_configurator_has_the_fields_that_refusals_read():
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

    read = {"model", "model_config", "model_dtype", "server_args"}
    read |= {"use_mla_backend", "is_hybrid_swa", "mambaish_config"}
    assert read <= set(KVCacheConfigurator.__dataclass_fields__)


def test_another_sglang_version_is_rejected(monkeypatch, capsys, tmp_path):
    patch.check_version()
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.6.0" if name == "sglang" else real(name))
    monkeypatch.setattr(patch, "_refuse_keyword", lambda sentence: None)  # a hook that would persist in this process
    monkeypatch.setattr("sys.argv", ["launch_server", "--model-path", "m"])
    with pytest.raises(patch.UnsupportedSGLang, match=r"0\.6\.0"):
        patch.check_version()  # logged by SGLang, which then serves without the plug-in
    monkeypatch.setattr("sys.argv", ["launch_server", "--kv-backend", "kvc"])
    with pytest.raises(SystemExit) as e:
        patch.check_version()
    assert e.value.code == 2 and INSTALL in one_sentence(capsys.readouterr().err.strip() + ".")
    file = tmp_path / "server.yaml"
    file.write_text("kv-backend: kvc\n")
    monkeypatch.setattr("sys.argv", ["launch_server", "--config", str(file)])
    with pytest.raises(SystemExit) as e:
        patch.check_version()
    assert e.value.code == 2 and INSTALL in one_sentence(capsys.readouterr().err.strip() + ".")


@pytest.mark.slow
def test_engine_with_another_sglang_says_what_to_install():
    """Its keywords are not on the command line; without our check SGLang would reject them as unknown."""
    code = (
        "import importlib.metadata as m; real = m.version;"
        "m.version = lambda name: '0.6.0' if name == 'sglang' else real(name);"
        "from sglang.srt.entrypoints.engine import Engine;"
        "from sglang.srt.plugins import load_plugins; load_plugins();"
        "from sglang.srt.server_args import ServerArgs;"
        "print('stock', ServerArgs(model_path='dummy').model_path);"
        "Engine(model_path='dummy', kv_backend='kvc')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and done.stdout.split()[-2:] == ["stock", "dummy"], done.stderr[-2000:]
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("kvc_patches.server_args.UnsupportedSGLang: ") and INSTALL in last


def test_entry_points():
    from importlib.metadata import entry_points

    (plugin,) = [e for e in entry_points(group="sglang.srt.plugins") if e.name == "kvc"]
    (platform,) = [e for e in entry_points(group="sglang.srt.platforms") if e.name == "kvc_cpu"]
    assert plugin.value == "kvc_patches:load"
    assert platform.value == "sglang_kvc.cpu.platform:activate"


class TestCpuPlatform:
    @pytest.fixture(autouse=True)
    def bare(self, monkeypatch):
        """A CPU-only machine whose command line has --kv-backend."""
        for name in ("SGLANG_PLATFORM", "SGLANG_USE_CPU_ENGINE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr("sys.argv", ["launch_server", "--kv-backend", "default"])

    @pytest.mark.parametrize("argv", ["--kv-backend kvc", "--kv-backend default", "--kv-backend=kvc"])
    def test_activates_when_requested(self, monkeypatch, argv):
        monkeypatch.setattr("sys.argv", ["launch_server", *argv.split()])
        assert activate() == PLATFORM_CLASS

    @pytest.mark.parametrize("key", ["kv-backend", "kv_backend"])
    def test_activates_for_config_file(self, monkeypatch, tmp_path, key):
        file = tmp_path / "server.yaml"
        monkeypatch.setattr("sys.argv", ["launch_server", "--config", str(file)])
        assert activate() is None  # SGLang reports the missing file
        file.write_text(f"{key}: kvc\nport: 30000\n")
        assert activate() == PLATFORM_CLASS
        file.write_text("port: 30000\n")
        assert activate() is None

    def test_stays_inactive_unless_requested(self, monkeypatch):
        monkeypatch.setattr("sys.argv", ["launch_server", "--model-path", "m", "--device", "cpu"])
        assert activate() is None
        monkeypatch.setenv("SGLANG_PLATFORM", "kvc_cpu")
        assert activate() == PLATFORM_CLASS

    @pytest.mark.parametrize("name", ["cuda", "xpu", "npu", "hpu", "musa", "mps"])
    def test_steps_aside_for_accelerator(self, monkeypatch, name):
        monkeypatch.setattr(torch, name, SimpleNamespace(is_available=lambda: True), raising=False)
        assert activate() is None

    def test_steps_aside_for_accelerators_by_other_names(self, monkeypatch):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        assert activate() is None

    def test_steps_aside_for_cpu_engine(self, monkeypatch):
        monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
        assert activate() is None

    def test_steps_aside_for_another_platform(self, monkeypatch):
        """SGLang refuses to start if two platforms activate."""
        from importlib.metadata import EntryPoint

        ours = EntryPoint("kvc_cpu", "sglang_kvc.cpu.platform:activate", "sglang.srt.platforms")
        other = EntryPoint("npu", "sglang_npu:activate", "sglang.srt.platforms")
        monkeypatch.setattr("sglang_kvc.cpu.platform.entry_points", lambda group: [ours, ours])
        assert activate() == PLATFORM_CLASS  # one distribution, found on two paths
        monkeypatch.setattr("sglang_kvc.cpu.platform.entry_points", lambda group: [ours, other])
        assert activate() is None

    @pytest.mark.slow
    @pytest.mark.parametrize("argv, platform", [("", "SRTPlatform"), ("--kv-backend default", "TorchCpuPlatform")])
    def test_sglang_resolves_platform_in_all_processes(self, argv, platform):
        """Runs in separate processes, as a server and its child processes start."""
        if torch.cuda.is_available():
            pytest.skip("a GPU is there")
        code = (
            "from sglang.srt.platforms import current_platform as p;"
            "print(type(p).__name__);"
        )
        env = {k: v for k, v in os.environ.items() if k not in ("SGLANG_PLATFORM", "SGLANG_USE_CPU_ENGINE")}
        done = subprocess.run(
            [sys.executable, "-c", code, *argv.split()], capture_output=True, text=True, timeout=300, env=env
        )
        assert done.stdout.split()[-1:] == [platform], done.stderr[-2000:]

    def test_engine_error_says_how_to_select_platform(self, model, server_args, monkeypatch):
        """Keywords are read after SGLang has chosen its platform."""
        from sglang.srt import platforms
        from sglang.srt.platforms.interface import SRTPlatform

        monkeypatch.setattr(platforms, "_current_platform", SRTPlatform())
        with pytest.raises(ConfigError, match="SGLANG_PLATFORM=kvc_cpu") as e:
            server_args.ServerArgs(model_path=model, device="cpu", kv_backend="kvc").resolve_once()
        one_sentence(str(e.value))

    def test_platform_provides_attributes_sglang_reads(self):
        from sglang.srt.platforms.interface import SRTPlatform

        from sglang_kvc.cpu.platform_class import TorchCpuPlatform

        platform = TorchCpuPlatform()
        assert isinstance(platform, SRTPlatform) and platform.is_out_of_tree()
        assert platform.get_device(0) == "cpu" and platform.get_dispatch_key_name() == "native"
        assert platform.get_default_attention_backend() == "torch_native"
        assert platform.get_paged_allocator_cls() is None  # SGLang's own
        assert not platform.capabilities.supports_triton  # SGLang takes its torch paths for rows and pages
