"""Lookup of our objects from those that SGLang passes to a hook.

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
    """The format id of the packed blocks of SGLang's request, from its level."""
    from sglang_kvc.options.request_quality import level

    return runtime.policy.format_id_of(None if budget_of(req) else level(req))


def longest_request(runtime: Runtime, format_id: int, budget: Budget | None = None, prompt: int | None = None) -> int:
    """Tokens, with the answer, of the longest request whose blocks are packed at `format_id`. `budget`: the budget of a
    one-shot prompt of `prompt` tokens; `prompt` None: of any length."""
    if budget is None:
        return runtime.capacity.longest_request(format_id, chunk_tokens())
    return runtime.capacity.one_shot.longest(budget, format_id, chunk_tokens(), prompt)


def chunk_tokens() -> int | None:
    """Tokens of a chunk of a prompt; None without chunked prefill."""
    from sglang.srt.runtime_context import get_schedule

    chunk = get_schedule().chunked_prefill_size
    return chunk if chunk is not None and chunk > 0 else None


def budget_of(req: Any) -> Budget | None:
    """The budget for the whole prompt of SGLang's request, None if it asked for none."""
    return getattr(req, "kvc_budget", None)
