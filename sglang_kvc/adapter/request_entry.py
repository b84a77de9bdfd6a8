"""The entry of a request into SGLang's queue: its quality, namespace, session and length limit."""

from __future__ import annotations

import itertools
import math
from typing import Any

from ..cache.one_shot import Budget, check_served
from ..cache.runtime import Runtime
from ..options.config import REUSE
from ..options.request_hints import Hints
from ..options.request_quality import asks, is_one_shot, level_of, namespace, offered, salted
from .model_identity import adapter_digest
from .request_limits import default_budget, format_id_of, in_session, limit_request, longest_prompt, longest_request

_numbers = itertools.count()


def enter_queue(runtime: Runtime, scheduler: Any, req: Any) -> None:
    """Set the quality and the namespace of a request of SGLang's `scheduler`, and abort a request that cannot be
    served."""
    req.skip_radix_cache_insert = False
    _read_quality(runtime, req)
    unsalted = runtime.salt_only and format_id_of(runtime, req) > 0 and not salted(req)
    # The next turn of a session hits the blocks of an unsalted turn, so these outlive the request. With overridden
    # embeddings, the token ids do not determine K and V.
    overridden = req.positional_embed_overrides is not None
    req.kvc_private = (unsalted and req.session is None) or req.kvc_budget is not None or overridden
    given = req.extra_key
    if runtime.config.store_option and req.lora_id is not None:
        # KV events of Dynamo's format look for the id at the end.
        req.extra_key = f"{_lora_digest(scheduler, req.lora_id)}@{req.extra_key}"
    req.extra_key = namespace(req.extra_key, req.kvc_level, _number(req) if unsalted or req.kvc_private else None)
    if req.lora_id is not None and not req.kvc_private:
        _name_adapter(scheduler, req, given)
    if req.to_finish is None:
        limit_request(req, runtime)
    # A refused prompt has one token by now, so it does not count as a turn of its session.
    if runtime.config.eviction == REUSE and (reuse := scheduler.tree_cache.reuse) is not None:
        reuse.arrive(req, request_priority(scheduler, req))


def longest_prompt_of(runtime: Runtime, req: Any) -> int:
    """Tokens of the longest prompt that the quality of a request allows, before it enters SGLang's queue. ValueError:
    the server refuses it at any length."""
    level, budget = _quality(runtime, req)
    format_id = runtime.policy.format_id_of(None if budget else level)
    return longest_prompt(runtime, longest_request(runtime, format_id, budget))


def _name_adapter(scheduler: Any, req: Any, given: str) -> None:
    """Let KV events find the name of the adapter, which SGLang has noted by the key `given`, by the final key, too."""
    names = getattr(scheduler, "kv_event_lora_names", None)
    if names is not None and (name := names.get(given)) is not None:
        names.register(req, name)


def _number(req: Any) -> int:
    """A number that no other request has, except the turns of the same session."""
    if req.session is None:
        return next(_numbers)
    if not hasattr(req.session, "kvc_number"):
        req.session.kvc_number = next(_numbers)
    return req.session.kvc_number


def _read_quality(runtime: Runtime, req: Any) -> None:
    """Set `kvc_level`, `kvc_budget` and `kvc_hints`, or abort the request."""
    req.kvc_level = req.kvc_budget = None
    req.kvc_hints = Hints()
    try:
        req.kvc_hints = Hints.parse(req.sampling_params.custom_params)
        req.kvc_level, req.kvc_budget = _quality(runtime, req)
    except ValueError as e:
        req.set_finish_with_abort(str(e))


def _quality(runtime: Runtime, req: Any) -> tuple[str | None, Budget | None]:
    """The level and the budget of a request, from its custom parameters and `--kvc-one-shot`. ValueError: this server
    cannot serve them."""
    params = req.sampling_params.custom_params
    if not asks(params):
        budget = default_budget(req, runtime)
        return str(budget) if budget else None, budget
    level = level_of(params, offered(runtime.config), runtime.policy.default_level)
    if not is_one_shot(level):
        return level, None
    check_served(runtime, in_session=in_session(req), returns_experts=req.return_routed_experts)
    return level, Budget.parse(level)


def request_priority(scheduler: Any, req: Any) -> float:
    """The request's priority, larger for requests that SGLang prefers, lowest without one; 0 without priority
    scheduling."""
    if not scheduler.enable_priority_scheduling:
        return 0.0
    if req.priority is None:
        return -math.inf
    return -req.priority if scheduler.schedule_low_priority_values_first else req.priority


def _lora_digest(scheduler: Any, lora_id: str) -> str:
    """Digest of a LoRA adapter. Its id names an adapter of `--lora-paths` by its path, and the next server may find
    other weights there."""
    return adapter_digest(scheduler.tp_worker.model_runner.lora_manager.loras[lora_id])
