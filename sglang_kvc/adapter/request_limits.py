"""The format, budget and length limit of SGLang's requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang.srt.runtime_context import get_schedule

from ..cache.one_shot import Budget, check_served
from ..cache.runtime import Runtime
from ..options.request_quality import level


def format_id_of(runtime: Runtime, req: Any) -> int:
    """The format id of the packed blocks of SGLang's request, from its level."""
    return runtime.policy.format_id_of(None if budget_of(req) else level(req))


def longest_request(runtime: Runtime, format_id: int, budget: Budget | None = None, prompt: int | None = None) -> int:
    """Tokens, with the answer, of the longest request whose blocks are packed at `format_id`. `budget`: the budget of a
    one-shot prompt of `prompt` tokens; `prompt` None: of any length."""
    if budget is None:
        return runtime.capacity.longest_request(format_id, chunk_tokens(runtime))
    return runtime.capacity.one_shot.longest(budget, format_id, chunk_tokens(runtime), prompt)


def longest_prompt(runtime: Runtime, request: int) -> int:
    """Tokens of the longest prompt that SGLang accepts, if the pool holds requests of `request` tokens."""
    return min(request - 2, runtime.prompt_limit)


def chunk_tokens(runtime: Runtime) -> int | None:
    """Tokens of a chunk of a prompt; None without chunked prefill."""
    chunk = get_schedule().chunked_prefill_size
    return chunk if runtime.chunks_prompts and chunk is not None and chunk > 0 else None


def budget_of(req: Any) -> Budget | None:
    """The budget for the whole prompt of SGLang's request, None if it asked for none."""
    return getattr(req, "kvc_budget", None)


def ranked_prompt(runtime: Runtime, req: Any) -> Sequence[int]:
    """The tokens whose last queries rank a one-shot prompt: those of the prompt. If it is thinned, they include the
    answer that its request wrote before a retraction, because chunks end with copies of the last tokens of both."""
    all_tokens, room = req.full_untruncated_fill_ids, runtime.capacity.one_shot
    thinned = room.segment_blocks(req.kvc_budget, len(all_tokens), format_id_of(runtime, req), chunk_tokens(runtime))
    return all_tokens if thinned else req.origin_input_ids


def in_session(req: Any) -> bool:
    """Whether later turns of a session may continue SGLang's request: of one opened with `/open_session`, or of one
    that requests only name (`--enable-session-radix-cache`)."""
    return req.session is not None or req.session_id is not None


def default_budget(req: Any, runtime: Runtime) -> Budget | None:
    """The server's budget (`--kvc-one-shot`) for SGLang's request, which names no level; None: the server's format
    serves it. That is so if the budget drops none of the prompt's tokens or the prompt cannot be one-shot, unless the
    prompt does not fit in the server's format and the budget allows longer prompts."""
    if (budget := runtime.config.one_shot) is None or not runtime.generates:
        return None
    try:
        check_served(runtime, in_session=in_session(req), returns_experts=req.return_routed_experts)
    except ValueError:
        return None
    fmt, tokens = runtime.store.block_formats[1].high, len(req.origin_input_ids)
    drops = budget.plan(runtime.layout, fmt, tokens // runtime.layout.block_tokens, tokens) is not None
    if drops and refusal(req, runtime, budget) is None:
        return budget
    if refusal(req, runtime, None) is None:
        return None
    return budget if longest_request(runtime, 1, budget) > longest_request(runtime, 1) else None


def limit_request(req: Any, runtime: Runtime) -> None:
    """Abort a request that is too long for its level, or cut its answer."""
    params, prompt, budget = req.sampling_params, len(req.origin_input_ids), budget_of(req)
    if runtime.generates:
        format_id = format_id_of(runtime, req)
        longest = longest_request(runtime, format_id, budget, prompt)
        if budget is not None and _needs_all_tokens(req):
            longest = min(longest, runtime.capacity.one_shot.longest_whole(format_id, chunk_tokens(runtime)))
        params.max_new_tokens = min(params.max_new_tokens, max(0, longest - prompt - 1))
        params.min_new_tokens = min(params.min_new_tokens, params.max_new_tokens)
    if (why := refusal(req, runtime, budget)) is not None:
        req.set_finish_with_abort(why)


def refusal(req: Any, runtime: Runtime, budget: Budget | None) -> str | None:
    """The reason, in one sentence, why an empty server cannot serve a request at its level, or its prompt with
    `budget`; None: it can."""
    prompt, format_id = len(req.origin_input_ids), format_id_of(runtime, req)
    limit = longest_prompt(runtime, longest_request(runtime, format_id, budget))
    if runtime.generates:
        fits = prompt < longest_request(runtime, format_id, budget, prompt) - 1
    else:
        fits = runtime.capacity.prompt_ever_fits(prompt, format_id, chunk_tokens(runtime), budget)
    if not fits:
        at_level = f" at {level(req)}" if level(req) else ""
        return (
            f"The prompt of {prompt} tokens does not fit into the KV cache{at_level}, which holds "
            f"{runtime.sizing.capacity_tokens} tokens uncompressed; use a prompt of up to {limit} tokens, or start the "
            f"server with more --kvc-memory."
        )
    if runtime.generates and prompt > limit:
        return (
            f"The prompt of {prompt} tokens does not fit into the model's context; use a prompt of up to {limit} "
            "tokens."
        )
    if budget is not None and _needs_all_tokens(req):
        try:
            runtime.capacity.one_shot.check_read(budget, prompt, format_id, chunk_tokens(runtime))
        except ValueError as e:
            return str(e)
    return None


def _needs_all_tokens(req: Any) -> bool:
    """Whether no chunk of a request may end with a probe: its input is not only tokens, or its client asks for more
    than the answer."""
    scored = req.return_logprob and 0 <= req.logprob_start_len < len(req.origin_input_ids)
    inputs = req.input_embeds, req.positional_embed_overrides, req.multimodal_inputs
    return scored or req.return_hidden_states or any(x is not None for x in inputs)
