"""`sglang.srt.sampling.sampling_params` and `Scheduler._add_request_to_queue`: what a request asks of the cache.

A level that does not exist is refused where SGLang checks all sampling parameters, before the request reaches the
scheduler; its client gets a 400 and nobody else notices. The namespace is set before the request is first matched with
the tree.
"""

from __future__ import annotations

from .registry import hook

VERIFY = "sglang.srt.sampling.sampling_params.SamplingParams.verify"
QUEUE = "sglang.srt.managers.scheduler.Scheduler._add_request_to_queue"


def before_verify(self, vocab_size):
    args = _served()
    if not self.custom_params or args is None:
        return
    from sglang_kvc.levels import level_of, names

    # Of the default format only the scheduler knows; its name is accepted where it was given.
    level_of(self.custom_params, names(args.kvc_levels), args.kvc_high)


def before_add_request_to_queue(self, req, is_retracted=False):
    from sglang_kvc.levels import level_of, names, namespace
    from sglang_kvc.runtime import current

    if current() is None or hasattr(req, "kvc_level"):
        return
    config = current().config
    req.kvc_level = level_of(req.sampling_params.custom_params, names(config.levels), config.high)
    if req.kvc_level:
        req.extra_key = namespace(req.extra_key, req.kvc_level)


def _served():
    """The server's arguments if its cache is ours, else None; the tokenizer process has no pool that could tell."""
    from sglang.srt.runtime_context import get_server_args

    try:
        args = get_server_args()
    except ValueError:  # not set: a process that serves nothing
        return None
    return args if getattr(args, "kv_backend", "default") == "kvc" else None


def register() -> None:
    hook(VERIFY, "before", "self vocab_size", before_verify)
    hook(QUEUE, "before", "self req is_retracted", before_add_request_to_queue)
