"""One name for an operation on every device: plain torch on the CPU, kernels on a GPU."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import TypeVar

Operation = TypeVar("Operation", bound=Callable)
_module = functools.cache(importlib.import_module)


def dispatch(reference: Operation, kernel: str) -> Operation:
    """`reference`, or `kernel` where the page store that is the first argument uses kernels.

    `reference` is a function, or a class with `plan` and `run`, in plain torch. `kernel` names its counterpart as
    "folder.module:name" in `kvc_kernels`, which takes the same arguments as far as the engine passes them. That module
    is imported at the first call that needs it, so the CPU never imports triton here. `operation.on(store)` is the one
    of the two that serves a store, for callers that ask once; `operation.reference` is for tests that compare both.
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
