"""`Scheduler` and `ScheduleBatch.check_decode_mem`: count forwards, harvest page counts, settle, and retry admission.

A forward's result is processed after that forward has finished on the device, and so has everything before it on the
forward stream. Page counts of its compactions are read there without a sync.
"""

from __future__ import annotations

from .lookup import current, runtime_of
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
    """Look at waiting requests again when packing has freed memory, and not while all of them load blocks. Prefetch
    blocks of those that still wait."""
    runtime = runtime_of(self.token_to_kv_pool_allocator)
    if runtime is None:
        return orig(self, running_batch)
    from sglang.srt.managers.schedule_batch import NextBatchPlan

    from sglang_kvc.adapter import waiting_queue

    waiting_queue.before_pass(runtime, self, running_batch)
    if waiting_queue.leaves_out_pass(runtime, self):
        return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
    was_full = running_batch.batch_is_full
    plan = orig(self, running_batch)
    waiting_queue.after_pass(runtime, self, plan, was_full)
    return plan


def before_on_idle(self):
    """Settle an idle runtime. If a prompt waits for stored blocks, no forward is due that would launch its load."""
    if (runtime := current()) is None:
        return
    idle = self.is_fully_idle()
    if runtime.unsettled and (idle or runtime.host_tier is not None):
        with self.forward_stream_ctx:
            runtime.settle() if idle else runtime.flush()
    if not idle and runtime.host_tier is not None:
        self.tree_cache.wait_for_reads()


def end_loads(scheduler):
    """End loads of which no request waits for the end, or whose end a paused scheduler would not notice."""
    if (runtime := current()) is not None:
        from sglang_kvc.adapter import decode_memory

        with scheduler.forward_stream_ctx:
            decode_memory.end_loads(runtime, scheduler.tree_cache)


def after_pause_generation(_, self, recv_req):
    """All requests were retracted."""
    if recv_req.mode == "retract":
        end_loads(self)


def before_flush_cache(self, empty_cache=True):
    """The prompts of loads were aborted, or wait while the engine is paused. SGLang flushes only if it is idle."""
    end_loads(self)


def around_check_decode_mem(orig, self, selected_indices=None):
    """Before a retraction: settle compactions and wait for loads, then cancel loads that have not begun, then demote
    running blocks, and check again after each."""
    if (runtime := current()) is None:
        return orig(self, selected_indices)
    from sglang_kvc.adapter import decode_memory

    if decode_memory.has_block_per_request(runtime, self) or orig(self, selected_indices):
        return True
    if decode_memory.settle(runtime, self) and orig(self, selected_indices):
        return True
    if decode_memory.cancel_loads(runtime, self) and orig(self, selected_indices):
        return True
    return decode_memory.demote(runtime, self, selected_indices) and orig(self, selected_indices)


def register() -> None:
    hook(f"{SCHEDULER}.run_batch", "before", "self batch pp_proxy_tensors", before_run_batch)
    hook(f"{SCHEDULER}.process_batch_result", "after", "self batch result", after_process_batch_result)
    hook(f"{SCHEDULER}.get_new_batch_prefill", "around", "self running_batch", around_get_new_batch_prefill)
    hook(f"{SCHEDULER}.on_idle", "before", "self", before_on_idle)
    hook(f"{SCHEDULER}.flush_cache", "before", "self empty_cache", before_flush_cache)
    hook(f"{SCHEDULER}.pause_generation", "after", "self recv_req", after_pause_generation)
    hook(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.check_decode_mem",
        "around",
        "self selected_indices",
        around_check_decode_mem,
    )
