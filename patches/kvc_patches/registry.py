"""Registers hooks with a record of the signature each relies on, and refuses to serve when one did not apply."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass

SGLANG_VERSION = "0.5.17"


@dataclass(frozen=True)
class Hook:
    """`parameters` are the names of the hooked function's parameters in the SGLang version above."""

    target: str
    kind: str
    parameters: tuple[str, ...]


HOOKS: dict[str, Hook] = {}


def hook(target: str, kind: str, parameters: str, fn: Callable) -> None:
    """Register `fn` on the dotted path `target`. `kind` is before, after, around or replace."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if target in HOOKS:
        return
    HOOKS[target] = Hook(target, kind, tuple(parameters.split()))
    HookRegistry.register(target, fn, HookType[kind.upper()])


def resolve(target: str):
    """The object behind a dotted path, whose tail may lie inside a class."""
    parts = target.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            obj = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for name in parts[cut:]:
            obj = getattr(obj, name)
        return obj
    raise ImportError(target)


def parameters_of(fn: Callable) -> tuple[str, ...]:
    return tuple(inspect.signature(inspect.unwrap(fn)).parameters)


def verify() -> None:
    """Raise unless every registered hook is in force: a half-patched server must not serve."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = sorted(set(HOOKS) - set(HookRegistry._patched))
    if missing:
        raise RuntimeError(
            f"--kv-backend kvc cannot serve: {len(missing)} of its hooks into SGLang did not apply "
            f"({', '.join(missing)}); install the SGLang version it is made for ({SGLANG_VERSION}) "
            "or start with --kv-backend default"
        )
