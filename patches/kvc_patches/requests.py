"""`SamplingParams.verify` and `Scheduler._add_request_to_queue`: a request's quality, namespace and session.

An unknown level or hint is refused where SGLang checks all sampling parameters, before the request reaches the
scheduler; its client gets a 400. Front ends that do not load plug-ins (the workers of `--tokenizer-worker-num`) do not
check, so the scheduler then aborts such a request with the same sentence. The namespace is set before the request is
first matched with the tree.

A request that can never be admitted is aborted, because it would block the queue forever: SGLang queues embedding
prompts of any length, and has one limit for all levels. An answer is cut to the limit of its level, as SGLang cuts it
to the size of its pool.

SGLang keeps a request out of the tree if it overrides embeddings, or if its `bootstrap_host` is that of the warm-up for
disaggregated servers. A prompt of two chunks would then compute its first chunk forever, because chunks advance by the
tokens in the tree. The flag is therefore reset for every request. Overridden embeddings get a namespace of their own
instead, and disaggregated servers are refused.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace

from .lookup import current
from .registry import hook

VERIFY = "sglang.srt.sampling.sampling_params.SamplingParams.verify"
QUEUE = "sglang.srt.managers.scheduler.Scheduler._add_request_to_queue"


def before_verify(self, vocab_size):
    from sglang_kvc.options.request_hints import Hints
    from sglang_kvc.options.request_quality import asks, level_of

    if self.custom_params is not None and (args := _served()) is not None:
        Hints.parse(self.custom_params)
        if asks(self.custom_params):
            level_of(self.custom_params, *_levels_of_args(args))


def before_add_request_to_queue(self, req, is_retracted=False):
    if (runtime := current()) is None or hasattr(req, "kvc_level"):
        return
    from sglang_kvc.adapter.request_entry import enter_queue

    enter_queue(runtime, self, req)


def _served():
    """The server's arguments if it runs with `--kv-backend kvc`, else None. The tokenizer process has no pool."""
    from sglang.srt.runtime_context import get_server_args

    try:
        args = get_server_args()
    except ValueError:  # not set in a process that does not serve
        return None
    return args if getattr(args, "kv_backend", "default") == "kvc" else None


def _levels_of_args(args) -> tuple[tuple[str, ...], str | None]:
    """The offered levels and the default format. The scheduler has them from its pool."""
    from sglang_kvc.options.server_args import KVC_OPTIONS

    return _resolved(tuple((name, getattr(args, name)) for name in KVC_OPTIONS))


@functools.lru_cache(maxsize=4)
def _resolved(options: tuple[tuple[str, object], ...]) -> tuple[tuple[str, ...], str | None]:
    """Cached by the options' values, because resolving them may read a calibration file."""
    from sglang_kvc.options.request_quality import offered
    from sglang_kvc.options.resolve import resolve_config
    from sglang_kvc.policies import make_policy

    config = resolve_config(SimpleNamespace(**dict(options)))
    return offered(config), make_policy(config).default_level


def register() -> None:
    hook(VERIFY, "before", "self vocab_size", before_verify)
    hook(QUEUE, "before", "self req is_retracted", before_add_request_to_queue)
