"""Lookup of the runtime of a hook.

`sglang_kvc` is imported at call time, because hooks are registered in every process, even with another backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_kvc.cache.runtime import Runtime


def current() -> Runtime | None:
    """The runtime of this process; None before its pool is built, and with another backend."""
    from sglang_kvc.cache import runtime

    return runtime.current()


def runtime_of(allocator: Any) -> Runtime | None:
    """The runtime of SGLang's token-to-KV allocator; None if the allocator is not ours."""
    from sglang_kvc.adapter.allocator import KvcAllocator

    return allocator.runtime if isinstance(allocator, KvcAllocator) else None
