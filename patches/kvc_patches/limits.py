"""`TpModelWorker.get_worker_info` and `validate_input_length`: the longest request that SGLang accepts.

SGLang accepts requests that fit into the pool uncompressed. Longer requests fit if they are packed chunk by chunk. The
limit here is that of the format or one-shot budget that takes the least memory. `requests` applies each request's own
limit, and names it in the refusal.

SGLang admits a request only if one more page is free. A request that fits only without that page would wait forever and
block the queue. With pages of one token, this concerns one or two lengths; here a page is a block.
"""

from __future__ import annotations

import contextlib

from .lookup import current
from .registry import hook

LENGTH, INPUT = 4, 5  # indices of `max_req_len` and `max_req_input_len` in the worker's tuple
RATIOS = ("8x", "16x", "32x", "64x")  # budgets whose limits `/server_info` states


def around_get_worker_info(orig, self):
    info = orig(self)
    if (runtime := current()) is None:
        return info
    from sglang_kvc.adapter.request_limits import longest_request

    runtime.generates = self.model_config.is_generation
    limits, margin, context = list(info), info[LENGTH] - info[INPUT], self.model_config.context_len - 1
    policy = runtime.policy
    # No request starts at a format below the server's own, or ends at one of blocks that are planned later.
    others = {*policy.ladder[1:], *({policy.unplanned_format, policy.answer_format} - {0})}
    formats = set(range(len(runtime.store.block_formats))) - others
    longest = max(longest_request(runtime, format_id) for format_id in formats)
    longest = max(longest, *_longest_requests(runtime).values())
    limits[LENGTH] = min(context, longest)
    limits[INPUT] = max(1, min(context - margin, longest - 1))  # SGLang refuses prompts of this length
    runtime.prompt_limit = limits[INPUT] - 1
    return tuple(limits)


def around_validate_input_length(orig, req, max_req_input_len, allow_auto_truncate):
    """Leave refusals to `requests`, and cut a prompt to the limit of its own quality. SGLang names, and cuts to, one
    token more than it accepts."""
    if (runtime := current()) is None:
        return orig(req, max_req_input_len, allow_auto_truncate)
    if not allow_auto_truncate:
        return None
    from sglang_kvc.adapter.request_entry import longest_prompt_of

    with contextlib.suppress(ValueError):
        if len(req.origin_input_ids) > (longest := longest_prompt_of(runtime, req)):
            orig(req, longest, True)
    return None


def longest_prompts(runtime) -> dict[str, int]:
    """Tokens of the longest prompt that leaves room for an answer, by requested quality."""
    from sglang_kvc.adapter.request_limits import longest_prompt

    return {name: longest_prompt(runtime, tokens) for name, tokens in _longest_requests(runtime).items()}


def _longest_requests(runtime) -> dict[str, int]:
    """Tokens, with the answer, of the longest request that the pool holds, by requested quality."""
    from sglang_kvc.adapter.request_limits import longest_request
    from sglang_kvc.cache.one_shot import PREFIX, Budget, check_served
    from sglang_kvc.options.request_quality import offered

    format_id = runtime.policy.format_id_of(None)
    limits = {"default": longest_request(runtime, format_id)}
    if not runtime.generates:  # budgets do not apply to embeddings
        return limits
    if PREFIX in offered(runtime.config):
        with contextlib.suppress(ValueError):
            check_served(runtime, in_session=False)
            for name in (f"{PREFIX}:{ratio}" for ratio in RATIOS):
                limits[name] = longest_request(runtime, format_id, Budget.parse(name))
    if (budget := runtime.config.one_shot) is not None:
        limits[runtime.config.high] = limits["default"]
        limits[str(budget)] = longest_request(runtime, format_id, budget)
        limits["default"] = max(limits["default"], limits[str(budget)])
    return limits


def register() -> None:
    hook(
        "sglang.srt.managers.scheduler.validate_input_length",
        "around",
        "req max_req_input_len allow_auto_truncate",
        around_validate_input_length,
    )
    hook("sglang.srt.managers.tp_worker.TpModelWorker.get_worker_info", "around", "self", around_get_worker_info)
