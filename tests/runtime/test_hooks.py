"""The contract with SGLang: every hooked function exists with the parameters that the hook was written for."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvc_patches
from kvc_patches import registry


@pytest.fixture(scope="module")
def hooks():
    kvc_patches.load()
    return dict(registry.HOOKS)


def test_every_hook_meets_the_function_it_was_written_for(hooks):
    assert len(hooks) >= 15
    for target, hook in hooks.items():
        assert registry.parameters_of(registry.resolve(target)) == hook.parameters, target


def test_verify_names_the_hooks_that_did_not_apply(hooks, monkeypatch):
    from sglang.srt.plugins.hook_registry import HookRegistry

    lost = "sglang.srt.mem_cache.allocation.alloc_for_decode"
    monkeypatch.setattr(HookRegistry, "_patched", set(hooks) - {lost})
    with pytest.raises(RuntimeError, match=r"cannot serve: 1 of its hooks.*alloc_for_decode"):
        registry.verify()
    monkeypatch.setattr(HookRegistry, "_patched", set(hooks))
    registry.verify()


def test_sglang_applies_all_of_them():
    """In a process of its own: SGLang's loader finds the entry point and every hook is in force afterwards."""
    code = (
        "from sglang.srt.plugins import load_plugins; load_plugins();"
        "from kvc_patches import registry; registry.verify(); print(len(registry.HOOKS))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) >= 15


def test_tensor_code_never_imports_sglang():
    code = (
        "import sys, kvc_kernels.ops, sglang_kvc.policies;"
        "assert not any(m.split('.')[0] == 'sglang' for m in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
