"""`Scheduler` and `ScheduleBatch.check_decode_mem`: count forwards, harvest page counts, settle, and retry admission.

A forward's result is processed after that forward has finished on the device, and so has everything before it on the
forward stream. Page counts of its compactions are read there without a sync.
"""

from __future__ import annotations

from .lookup import current, format_id_of, runtime_of
from .registry import hook

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"


def before_run_batch(self, batch, pp_proxy_tensors=None):
    if (runtime := current()) is not None:
        runtime.step += 1


def after_process_batch_result(_, self, batch, result):
    if (runtime := current()) is not None:
        runtime.processed += 1
        runtime.harvest(runtime.processed)


def around_get_new_batch_prefill(orig, self, running_batch):
    """Look at waiting requests again when packing has freed memory.

    SGLang's free memory only shrinks while requests run, so it leaves a full batch alone until one of them ends.
    """
    from sglang_kvc.adapter.tree_prefetch import prefetch
    from sglang_kvc.options.config import REUSE

    runtime = runtime_of(self.token_to_kv_pool_allocator)
    if runtime is None:
        return orig(self, running_batch)
    if runtime.config.eviction == REUSE and (reuse := self.tree_cache.reuse) is not None:
        reuse.wait(self.waiting_queue)
    # SGLang also leaves the queue alone if nothing runs, although the request that it waited for may have been aborted.
    nothing_runs = running_batch.is_empty() and self.chunked_req is None
    if running_batch.batch_is_full and (nothing_runs or runtime.capacity.has_room_again()):
        running_batch.batch_is_full = False
    was_full = running_batch.batch_is_full
    plan = orig(self, running_batch)
    if plan.running_batch.batch_is_full and not was_full:
        runtime.capacity.remember_refusal()
    if runtime.host_tier is not None and self.waiting_queue:
        prefetch(self.tree_cache, self.waiting_queue, lambda: _unclaimed_tokens(self, runtime, plan))
    return plan


def _unclaimed_tokens(scheduler, runtime, plan) -> float:
    """Tokens of memory that neither the running nor the admitted requests may need."""
    from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

    admitted = [] if plan.batch_to_run is None else plan.batch_to_run.reqs
    claimed = 0.0
    for req in {*plan.running_batch.reqs, *admitted, *filter(None, [scheduler.chunked_req])}:
        answer = min(req.sampling_params.max_new_tokens - len(req.output_ids), CLIP_MAX_NEW_TOKENS)
        if not req.sampling_params.ignore_eos:
            answer *= scheduler.new_token_ratio_tracker.current
        prompt = 0 if req.kvc is None else max(0, len(req.full_untruncated_fill_ids) - req.kvc.length)
        claimed += runtime.capacity.running_tokens(req.kvc, prompt + answer, format_id_of(runtime, req))
    return scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size() - claimed


def before_on_idle(self):
    runtime = current()
    if runtime is None or not runtime.unsettled:
        return
    with self.forward_stream_ctx:
        if self.is_fully_idle():
            runtime.settle()
        elif runtime.host_tier is not None:
            runtime.flush()  # a prompt waits for a load, but no forward is due that would launch it


def around_check_decode_mem(orig, self, selected_indices=None):
    """Before a retraction: settle queued and running compactions, wait for loads (which lock blocks), and check again;
    then demote blocks of the running requests."""
    runtime = current()
    # A step takes at most one block per request. SGLang serves beam search, with several rows per request, only with
    # pages of one token. If one block per request is free, the exact need is not counted.
    if runtime is not None and len(self.reqs) * runtime.layout.block_tokens <= runtime.capacity.available_tokens():
        return True
    if orig(self, selected_indices):
        return True
    if runtime is None:
        return False
    loads = runtime.host_tier is not None and self.tree_cache.loads
    if loads or runtime.overcharged:
        runtime.settle()
        if loads:
            self.tree_cache.check_hicache_events()
        if orig(self, selected_indices):
            return True
    if not runtime.demotion.enabled:
        return False
    seqs = [req.kvc for req in self.reqs if req.kvc is not None]  # None: the request has just ended
    tokens = self.new_tokens_required_next_decode(selected_indices)
    return runtime.demotion.demote_running(seqs, tokens) and orig(self, selected_indices)


def register() -> None:
    hook(f"{SCHEDULER}.run_batch", "before", "self batch pp_proxy_tensors", before_run_batch)
    hook(f"{SCHEDULER}.process_batch_result", "after", "self batch result", after_process_batch_result)
    hook(f"{SCHEDULER}.get_new_batch_prefill", "around", "self running_batch", around_get_new_batch_prefill)
    hook(f"{SCHEDULER}.on_idle", "before", "self", before_on_idle)
    hook(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.check_decode_mem",
        "around",
        "self selected_indices",
        around_check_decode_mem,
    )
