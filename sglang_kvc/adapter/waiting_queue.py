"""SGLang's queue of waiting requests: when the scheduler looks at it again, and which prompts are prefetched."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

from ..cache.runtime import Runtime
from ..options.config import REUSE
from .request_limits import chunk_tokens, format_id_of
from .tree_prefetch import prefetch

MOST_LEFT_OUT = 15  # passes in a row


def before_pass(runtime: Runtime, scheduler: Any, running_batch: Any) -> None:
    """Let the scheduler look at waiting requests again when memory has become free, or when less is reserved for
    answers.

    In SGLang, free memory only shrinks while requests run, so it leaves a full batch alone until one of them ends. It
    also leaves the queue alone if nothing runs, although the request that it waited for may have been aborted.
    """
    if runtime.config.eviction == REUSE and (reuse := scheduler.tree_cache.reuse) is not None:
        reuse.wait(scheduler.waiting_queue)
    nothing_runs = running_batch.is_empty() and scheduler.chunked_req is None
    ratio = scheduler.new_token_ratio_tracker.current
    if running_batch.batch_is_full and (nothing_runs or runtime.capacity.has_room_again(ratio)):
        running_batch.batch_is_full = False


def leaves_out_pass(runtime: Runtime, scheduler: Any) -> bool:
    """Whether to leave out a pass that would admit no one. Every sixteenth pass is made, because a pass marks the
    prefixes of waiting prompts as used."""
    left_out = getattr(scheduler, "kvc_left_out", 0)
    scheduler.kvc_left_out = 0
    if left_out == MOST_LEFT_OUT or not all_wait_for_blocks(runtime, scheduler):
        return False
    scheduler.kvc_left_out = left_out + 1
    return True


def all_wait_for_blocks(runtime: Runtime, scheduler: Any) -> bool:
    """Whether a pass would admit no one, because in the last one every prompt waited for cached blocks, and no transfer
    has ended since.

    A pass matches all prompts and adds up what running requests may need, which takes 1 to 2 ms of a decode step. A
    pass that may preempt requests, delays prompts or moves them from another queue is not left out."""
    if runtime.host_tier is None or scheduler.chunked_req is not None:
        return False
    tree, queue = scheduler.tree_cache, scheduler.waiting_queue
    if not queue or not tree.transferring:
        return False
    if any(getattr(req, "kvc_waits_for", None) != tree.transfers_ended for req in queue):
        return False
    return not (
        scheduler.enable_priority_preemption
        or scheduler.prefill_delayer
        or scheduler.grammar_manager.has_waiting_grammars()
    )


def after_pass(runtime: Runtime, scheduler: Any, plan: Any, was_full: bool) -> None:
    """Remember the room at which a pass filled the batch, and prefetch for the prompts that still wait.

    Before a decode step, loads begin in the next turn: eviction and launches take as long as a pass, and all of it
    together may take the scheduler's thread longer than the step takes the device. A prefill takes the device longer,
    and a load that begins after it would have to wait for it."""
    tiered = runtime.host_tier is not None
    if plan.running_batch.batch_is_full and not was_full:
        claimed = scheduler.tree_cache.queued_load_tokens if tiered else 0
        runtime.capacity.remember_refusal(scheduler.new_token_ratio_tracker.current, claimed)
    if tiered and scheduler.waiting_queue and not runtime.released:
        prefetch(scheduler.tree_cache, scheduler.waiting_queue, lambda: _unclaimed_tokens(scheduler, runtime, plan))
        decodes = plan.batch_to_run is None and not plan.running_batch.is_empty()
        if not decodes:
            scheduler.tree_cache.begin_loads()


def _unclaimed_tokens(scheduler: Any, runtime: Runtime, plan: Any) -> float:
    """Tokens of memory that neither the running nor the admitted requests may need."""
    admitted = [] if plan.batch_to_run is None else plan.batch_to_run.reqs
    capacity, claimed = runtime.capacity, 0.0
    # A dictionary, not a set: all ranks must add the floats in the same order.
    for req in dict.fromkeys([*plan.running_batch.reqs, *admitted, *filter(None, [scheduler.chunked_req])]):
        answer = min(req.sampling_params.max_new_tokens - len(req.output_ids), CLIP_MAX_NEW_TOKENS)
        answer *= scheduler.new_token_ratio_tracker.current
        rest = 0 if req.kvc is None else max(0, len(req.full_untruncated_fill_ids) - req.kvc.length)
        if rest:
            claimed += capacity.rest_tokens(req.kvc, rest, answer, format_id_of(runtime, req), chunk_tokens(runtime))
        else:
            claimed += capacity.running_tokens(req.kvc, answer, format_id_of(runtime, req))
    return scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size() - claimed
