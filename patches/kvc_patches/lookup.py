"""Lookup of our objects from those that SGLang passes to a hook. `adapter/request_limits.py` describes the functions on
requests.

`sglang_kvc` is imported at call time, because hooks are registered in every process, even with another backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_kvc.cache.one_shot import Budget
    from sglang_kvc.cache.runtime import Runtime


def current() -> Runtime | None:
    """The runtime of this process; None before its pool is built, and with another backend."""
    from sglang_kvc.cache import runtime

    return runtime.current()


def runtime_of(allocator: Any) -> Runtime | None:
    """The runtime of SGLang's token-to-KV allocator; None if the allocator is not ours."""
    from sglang_kvc.adapter.allocator import KvcAllocator

    return allocator.runtime if isinstance(allocator, KvcAllocator) else None


def format_id_of(runtime: Runtime, req: Any) -> int:
    from sglang_kvc.adapter import request_limits

    return request_limits.format_id_of(runtime, req)


def longest_request(runtime: Runtime, format_id: int, budget: Budget | None = None, prompt: int | None = None) -> int:
    from sglang_kvc.adapter import request_limits

    return request_limits.longest_request(runtime, format_id, budget, prompt)


def chunk_tokens() -> int | None:
    from sglang_kvc.adapter import request_limits

    return request_limits.chunk_tokens()


def budget_of(req: Any) -> Budget | None:
    from sglang_kvc.adapter import request_limits

    return request_limits.budget_of(req)
