"""`sglang.srt.managers.tp_worker`: the longest request that SGLang lets in.

SGLang accepts whatever fits into the pool, and admits it with a page beside it: a request that fits, but not with its
page, waits for ever, and all others behind it. With pages of one token that is a length or two; here a page is a block.
"""

from __future__ import annotations

from .registry import hook

LENGTH, INPUT = 4, 5  # places of `max_req_len` and `max_req_input_len` in what the worker tells


def longest_request(capacity: int, block_tokens: int) -> int:
    """Tokens of a request, with its answer, that an empty pool of `capacity` uncompressed tokens admits."""
    return max(1, capacity - block_tokens - 2)


def around_get_worker_info(orig, self):
    from sglang_kvc.cache.runtime import current

    info = orig(self)
    if (runtime := current()) is None:
        return info
    out, less = list(info), info[LENGTH] - info[INPUT]
    out[LENGTH] = min(info[LENGTH], longest_request(runtime.sizing.capacity_tokens, runtime.layout.block_tokens))
    out[INPUT] = max(1, out[LENGTH] - less)
    return tuple(out)


def register() -> None:
    hook("sglang.srt.managers.tp_worker.TpModelWorker.get_worker_info", "around", "self", around_get_worker_info)
