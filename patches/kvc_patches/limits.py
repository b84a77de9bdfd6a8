"""`TpModelWorker.get_worker_info`: the longest request that SGLang accepts.

SGLang accepts requests that fit into the pool uncompressed. Longer requests fit if they are packed chunk by chunk. The
limit here is that of the format or one-shot budget that takes the least memory. `requests` applies each request's own
limit.

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

    limits, margin = list(info), info[LENGTH] - info[INPUT]
    # No request starts at a format below the server's own.
    formats = set(range(len(runtime.store.block_formats))) - set(runtime.policy.ladder[1:])
    longest = max(longest_request(runtime, format_id) for format_id in formats)
    longest = max(longest, *(tokens + 2 for tokens in longest_prompts(runtime).values()))
    limits[LENGTH] = min(self.model_config.context_len - 1, longest)
    limits[INPUT] = max(1, limits[LENGTH] - margin)
    return tuple(limits)


def longest_prompts(runtime) -> dict[str, int]:
    """Tokens of the longest prompt that leaves room for an answer, by requested quality. The model's context may be
    shorter."""
    from sglang_kvc.adapter.request_limits import longest_request
    from sglang_kvc.cache.one_shot import PREFIX, Budget, check_served
    from sglang_kvc.options.request_quality import offered

    format_id = runtime.policy.format_id_of(None)
    limits = {"default": longest_request(runtime, format_id)}
    if PREFIX in offered(runtime.config):
        with contextlib.suppress(ValueError):
            check_served(runtime, in_session=False)
            for name in (f"{PREFIX}:{ratio}" for ratio in RATIOS):
                limits[name] = longest_request(runtime, format_id, Budget.parse(name))
    if (budget := runtime.config.one_shot) is not None:
        limits[runtime.config.high] = limits["default"]
        limits[str(budget)] = longest_request(runtime, format_id, budget)
        limits["default"] = max(limits["default"], limits[str(budget)])
    return {name: tokens - 2 for name, tokens in limits.items()}


def register() -> None:
    hook("sglang.srt.managers.tp_worker.TpModelWorker.get_worker_info", "around", "self", around_get_worker_info)
