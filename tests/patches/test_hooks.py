"""The contract with SGLang: every hooked function exists with the parameters that the hook was written for."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import kvc_patches
from kvc_patches import registry
from kvc_patches.registry import SERVER_ARGS

ROOT = Path(__file__).parents[2]
HOOK_LINES = 20  # a hook finds the runtime, asks sglang_kvc and calls the original
# Files of kvc_patches without hooks that ask the runtime.
NO_HOOKS = ("compare.py", "probes.py", "registry.py")


@pytest.fixture(scope="module")
def hooks():
    kvc_patches.load()
    return dict(registry.HOOKS)


@pytest.fixture
def patched(hooks, monkeypatch):
    """Makes `verify` believe that SGLang has patched all targets."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.setattr(HookRegistry, "_patched", set(registry.TARGETS))
    return HookRegistry._patched


def test_every_hook_matches_signature_of_its_function(hooks):
    assert set(hooks) == registry.TARGETS - {SERVER_ARGS} and SERVER_ARGS in registry.TARGETS
    for target, hook in hooks.items():
        assert registry.parameters_of(registry.resolve(target)) == hook.parameters, target


def test_verify_names_hooks_that_did_not_apply(patched):
    registry.verify()
    patched.remove("sglang.srt.mem_cache.allocation.alloc_for_decode")
    with pytest.raises(RuntimeError, match=r"cannot serve: 1 of its hooks.*alloc_for_decode"):
        registry.verify()


def test_verify_rejects_unregistered_hook(patched, monkeypatch):
    lost = "sglang.srt.managers.scheduler.Scheduler.run_batch"
    monkeypatch.delitem(registry.HOOKS, lost)
    patched.remove(lost)
    with pytest.raises(RuntimeError, match=r"cannot serve: 1 of its hooks.*run_batch"):
        registry.verify()


def test_verify_rejects_function_with_other_parameters(patched, monkeypatch):
    from sglang.srt.mem_cache import allocation

    monkeypatch.setattr(allocation, "alloc_for_decode", lambda batch, token_per_req, more: None)
    with pytest.raises(RuntimeError, match=r"cannot serve: .*different parameters.*alloc_for_decode"):
        registry.verify()


def test_verify_rejects_unfinished_load(patched, monkeypatch):
    """SGLang logs the exception of a plug-in and continues with the hooks registered so far."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from kvc_patches import metrics

    def fail():
        raise OSError("no metrics")

    monkeypatch.setattr(registry, "HOOKS", {})
    monkeypatch.setattr(registry, "loaded", False)
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(metrics, "register", fail)
    with pytest.raises(OSError):
        kvc_patches.load()
    assert 0 < len(registry.HOOKS) < len(registry.TARGETS) - 1
    HookRegistry._patched = set(HookRegistry._hooks)
    with pytest.raises(RuntimeError, match="cannot serve"):
        registry.verify()
    HookRegistry._patched = set(registry.TARGETS)  # all hooks are applied, but load() did not finish
    with pytest.raises(RuntimeError, match="cannot serve: it did not load completely"):
        registry.verify()


def test_half_patched_server_gets_no_attention(patched):
    """This holds even if the hook that checks first is itself missing."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    patched.clear()
    with pytest.raises(RuntimeError, match="cannot serve"):
        ATTENTION_BACKENDS["kvc"](None)


@pytest.mark.slow
def test_sglang_applies_all_hooks():
    """In a separate process SGLang's loader finds the entry point, and every hook is applied afterwards."""
    code = (
        "from sglang.srt.plugins import load_plugins; load_plugins();"
        "from kvc_patches import registry; registry.verify(); print('verified', len(registry.HOOKS))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-2:] == ["verified", str(len(registry.TARGETS) - 1)]


def test_tensor_code_imports_neither_sglang_nor_triton():
    code = (
        "import sys, kvc_kernels.ops, sglang_kvc.policies, sglang_kvc.engine.attention;"
        "assert not {m.split('.')[0] for m in sys.modules} & {'sglang', 'triton'}"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_porting_guide_contains_table_of_hooks(hooks):
    guide = (ROOT / "docs" / "porting.md").read_text().splitlines()
    assert set(registry.table()) <= set(guide), "run `python -m kvc_patches` and copy its table"


def test_changed_parameters_are_reported_by_target(hooks, monkeypatch):
    from sglang.srt.mem_cache import allocation

    monkeypatch.setattr(allocation, "alloc_for_decode", lambda batch, more: None)
    monkeypatch.delattr(allocation, "alloc_for_extend")
    assert registry.changed_parameters() == {
        "sglang.srt.mem_cache.allocation.alloc_for_decode": (
            "recorded (batch token_per_req), installed (batch more)"
        ),
        "sglang.srt.mem_cache.allocation.alloc_for_extend": "not found",
    }


def test_few_modules_import_sglang():
    """A port to another SGLang version has to review these modules and the hooks."""
    readers = {
        path.relative_to(ROOT / "sglang_kvc").as_posix()
        for path in (ROOT / "sglang_kvc").rglob("*.py")
        if re.search(r"^\s*(from|import) sglang\b", path.read_text(), re.MULTILINE)
    }
    allowed = {"options/server_args.py", "options/start.py", "options/model_facts.py"}
    assert {r for r in readers - allowed if r.split("/")[0] not in ("adapter", "cpu")} == set()


def test_hooks_are_short():
    long = {}
    for path in (ROOT / "patches" / "kvc_patches").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if path.name in NO_HOOKS or not isinstance(node, ast.FunctionDef) or node.name == "register":
                continue
            lines = node.end_lineno - node.lineno + 1
            if lines > HOOK_LINES:
                long[f"{path.name}: {node.name}"] = lines
    assert long == {}
