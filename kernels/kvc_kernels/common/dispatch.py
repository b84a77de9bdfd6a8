"""Dispatch of an operation by device: plain torch on the CPU, kernels on a GPU."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import TypeVar

Operation = TypeVar("Operation", bound=Callable)
_module = functools.cache(importlib.import_module)


def dispatch(reference: Operation, kernel: str) -> Operation:
    """Return an operation that calls `kernel` if its first argument, a page store, uses kernels, and `reference`
    otherwise.

    `reference` is a function, or a class with `plan` and `run`, in plain torch. `kernel` names its counterpart as
    "folder.module:name" in `kvc_kernels`; it accepts all arguments that the engine passes. Its module is imported at
    the first call that needs it, so on the CPU triton is never imported here. `operation.on(store)` returns the
    implementation for a store, for callers that keep it; `operation.reference` is for tests that compare both.
    """
    module, _, name = f"kvc_kernels.{kernel}".partition(":")

    def on(store):
        return getattr(_module(module), name) if store.use_kernels else reference

    @functools.wraps(reference, updated=())
    def operation(store, *args, **options):
        return on(store)(store, *args, **options)

    operation.on, operation.reference = on, reference
    operation.__name__ = operation.__qualname__ = name
    return operation
