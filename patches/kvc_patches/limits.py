"""`TpModelWorker.get_worker_info`: the longest request that SGLang accepts.

SGLang accepts what fits into the pool but admits it only with a page beside it. A request that fits without the page
would wait forever, and all others behind it. With pages of one token that is a length or two; here a page is a block.
"""

from __future__ import annotations

from .registry import hook

LENGTH, INPUT = 4, 5  # indices of `max_req_len` and `max_req_input_len` in the worker's tuple


def around_get_worker_info(orig, self):
    from sglang_kvc.cache.capacity import longest_request
    from sglang_kvc.cache.runtime import current

    info = orig(self)
    if (runtime := current()) is None:
        return info
    out, margin = list(info), info[LENGTH] - info[INPUT]
    out[LENGTH] = min(info[LENGTH], longest_request(runtime.sizing.capacity_tokens, runtime.layout.block_tokens))
    out[INPUT] = max(1, out[LENGTH] - margin)
    return tuple(out)


def register() -> None:
    hook("sglang.srt.managers.tp_worker.TpModelWorker.get_worker_info", "around", "self", around_get_worker_info)
