"""`SamplingParams.verify` and `Scheduler._add_request_to_queue`: a request's quality, namespace and session.

An unknown level or hint is refused where SGLang checks all sampling parameters, before the request reaches the
scheduler; its client gets a 400. Front ends that do not load plug-ins (the workers of `--tokenizer-worker-num`) do not
check, so the scheduler then aborts such a request with the same sentence. The namespace is set before the request is
first matched with the tree.

A request that can never be admitted is aborted, because it would block the queue forever: SGLang queues embedding
prompts of any length, and has one limit for all levels. An answer is cut to the limit of its level, as SGLang cuts it
to the size of its pool.

A client can keep its request out of the tree: SGLang does so if `bootstrap_host` is that of its own warm-up for
disaggregated servers. A prompt of two chunks would then compute its first chunk forever, because chunks advance by the
tokens in the tree. Disaggregated servers are refused, so the flag is reset for every request.
"""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace

from .lookup import budget_of, chunk_tokens, current, format_id_of, longest_request
from .registry import hook

VERIFY = "sglang.srt.sampling.sampling_params.SamplingParams.verify"
QUEUE = "sglang.srt.managers.scheduler.Scheduler._add_request_to_queue"
_numbers = itertools.count()


def before_verify(self, vocab_size):
    from sglang_kvc.options.request_hints import is_last
    from sglang_kvc.options.request_quality import asks, level_of

    if self.custom_params is not None and (args := _served()) is not None:
        is_last(self.custom_params)
        if asks(self.custom_params):
            level_of(self.custom_params, *_levels_of_args(args))


def before_add_request_to_queue(self, req, is_retracted=False):
    from sglang_kvc.cache.one_shot import Budget, check_served
    from sglang_kvc.options.config import REUSE
    from sglang_kvc.options.request_hints import is_last
    from sglang_kvc.options.request_quality import is_one_shot, level_of, namespace, offered, salted

    if (runtime := current()) is None or hasattr(req, "kvc_level"):
        return
    req.skip_radix_cache_insert = False
    req.kvc_level = req.kvc_budget = None
    req.kvc_last = False
    try:
        req.kvc_last = is_last(req.sampling_params.custom_params)
        req.kvc_level = level_of(
            req.sampling_params.custom_params, offered(runtime.config), runtime.policy.default_level
        )
        if is_one_shot(req.kvc_level):
            check_served(runtime, in_session=req.session is not None, returns_experts=req.return_routed_experts)
            req.kvc_budget = Budget.parse(req.kvc_level)
    except ValueError as e:
        req.kvc_level = None
        req.set_finish_with_abort(str(e))
    unsalted = runtime.salt_only and format_id_of(runtime, req) > 0 and not salted(req)
    req.kvc_private = unsalted or req.kvc_budget is not None
    if runtime.config.store_option and req.lora_id is not None:
        req.extra_key = f"{_adapter(self, req.lora_id)}@{req.extra_key}"  # KV events look for the id at the end
    req.extra_key = namespace(req.extra_key, req.kvc_level, next(_numbers) if req.kvc_private else None)
    if runtime.config.eviction == REUSE and (reuse := self.tree_cache.reuse) is not None:
        reuse.arrive(req)
    if req.to_finish is None:
        _bound(req, runtime, answers=self.is_generation)


def _adapter(scheduler, lora_id: str) -> str:
    """Digest of a LoRA adapter. Its id names an adapter of `--lora-paths` by its path, and the next server may find
    other weights there."""
    from sglang_kvc.adapter.model_identity import adapter_digest

    return adapter_digest(scheduler.tp_worker.model_runner.lora_manager.loras[lora_id])


def _bound(req, runtime, *, answers: bool) -> None:
    """Abort a request that is too long for its level, or cut its answer."""
    params, prompt, format_id = req.sampling_params, len(req.origin_input_ids), format_id_of(runtime, req)
    budget = budget_of(req)
    if answers:
        longest = longest_request(runtime, format_id, budget, prompt)
        fits = prompt < longest - 1
        params.max_new_tokens = min(params.max_new_tokens, max(0, longest - prompt - 1))
        params.min_new_tokens = min(params.min_new_tokens, params.max_new_tokens)
    else:
        fits = runtime.capacity.prompt_ever_fits(prompt, format_id, chunk_tokens(), budget)
    if not fits:
        level = f" at {req.kvc_level}" if req.kvc_level else ""
        req.set_finish_with_abort(
            f"The prompt of {prompt} tokens does not fit into the KV cache{level}, which holds "
            f"{runtime.sizing.capacity_tokens} tokens uncompressed; use a prompt of up to "
            f"{longest_request(runtime, format_id, budget) - 2} tokens, or start the server with more --kvc-memory."
        )
    elif budget is not None and _reads_prompt(req):
        try:
            runtime.capacity.one_shot.check_read(budget, prompt, format_id, chunk_tokens())
        except ValueError as e:
            req.set_finish_with_abort(str(e))


def _reads_prompt(req) -> bool:
    """Whether a request's input is not tokens, or its client asks for more than the answer."""
    scored = req.return_logprob and 0 <= req.logprob_start_len < len(req.origin_input_ids)
    return scored or req.return_hidden_states or req.input_embeds is not None


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
