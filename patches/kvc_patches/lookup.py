"""Our objects behind those that SGLang passes to a hook.

`sglang_kvc` is imported at call time: hooks are registered in every process, also in those that serve with another
backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_kvc.cache.one_shot import Budget
    from sglang_kvc.cache.runtime import Runtime


def current() -> Runtime | None:
    """The runtime of this process; None before its pool is built, and where another backend serves."""
    from sglang_kvc.cache import runtime

    return runtime.current()


def runtime_of(allocator: Any) -> Runtime | None:
    """The runtime behind SGLang's token-to-KV allocator; None where the allocator is not ours."""
    from sglang_kvc.adapter.allocator import KvcAllocator

    return allocator.runtime if isinstance(allocator, KvcAllocator) else None


def format_id_of(runtime: Runtime, req: Any) -> int:
    """The format id that blocks of SGLang's request go to, by its level."""
    from sglang_kvc.options.request_quality import level

    return runtime.policy.format_id_of(None if budget_of(req) else level(req))


def longest_request(runtime: Runtime, format_id: int, budget: Budget | None = None, prompt: int | None = None) -> int:
    """Tokens of the longest request, with its answer, whose blocks go to `format_id`. `budget`: that of a one-shot
    prompt of `prompt` tokens, or of any length."""
    if budget is None:
        return runtime.capacity.longest_request(format_id, chunk_tokens())
    return runtime.capacity.one_shot.longest(budget, format_id, chunk_tokens(), prompt)


def chunk_tokens() -> int | None:
    """Tokens of a chunk of a prompt; None where prompts are prefilled whole."""
    from sglang.srt.runtime_context import get_schedule

    chunk = get_schedule().chunked_prefill_size
    return chunk if chunk is not None and chunk > 0 else None


def budget_of(req: Any) -> Budget | None:
    """The budget of SGLang's request for its whole prompt, if it asked for one."""
    return getattr(req, "kvc_budget", None)
