"""SGLang's scheduler without a model, with or without our hooks. Tests and host-time benchmarks use it."""

from __future__ import annotations

import contextlib
from collections import deque
from types import SimpleNamespace
from unittest.mock import patch

from sglang.srt import runtime_context
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.schedule_policy import PrefillAdder, SchedulePolicy
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import NewTokenRatioTracker
from sglang.srt.mem_cache import allocation as sglang_allocation
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from kvc_patches import admission, allocation, retraction, waiting_order
from kvc_patches import scheduler as hooks

ADDER_HOOKS = {
    "__init__": admission.around_init,
    "add_one_req": admission.around_add_one_req,
    "add_chunked_req": admission.around_add_chunked_req,
    "preempt_to_schedule": admission.around_preempt_to_schedule,
    "_get_running_request_total_token_offset": admission.around_running_offset,
}
POLICY_HOOKS = {
    "_determine_active_policy": waiting_order.around_determine_active_policy,
    "_compute_prefix_matches": waiting_order.around_compute_prefix_matches,
}
ALLOCATION_HOOKS = {
    "alloc_for_extend": allocation.around_alloc_for_extend,
    "alloc_for_decode": allocation.around_alloc_for_decode,
    "release_req": retraction.around_release_req,
}


def _around(owner, name: str, hook):
    orig = getattr(owner, name)
    return patch.object(owner, name, lambda *args, **kwargs: hook(orig, *args, **kwargs))


def _host_hits(orig, req):
    return admission.after_host_hits(orig(req), req)


def _mix(orig, batch, running_batch):
    allocation.before_mix_with_running(batch, running_batch)
    orig(batch, running_batch)


@contextlib.contextmanager
def configured(runtime, *, rows: int, chunk: int | None = None, mixed: bool = False, interval: int = 0):
    """Set SGLang's options for `ModelFreeScheduler`, and apply our hooks outside the scheduler class.

    runtime: None for a stock server, without hooks. interval: `--prefill-decode-interval`.
    """
    options = dict(device="cpu", attention_backend="torch_native", chunked_prefill_size=chunk or -1)
    options |= dict(enable_mixed_chunk=mixed, pp_max_micro_batch_size=rows, prefill_decode_interval=interval)
    with contextlib.ExitStack() as stack:
        stack.enter_context(runtime_context.get_context().override_server_args(**options))
        if runtime is None:
            yield
            return
        for name, hook in ADDER_HOOKS.items():
            stack.enter_context(_around(PrefillAdder, name, hook))
        stack.enter_context(_around(Req, "materialized_host_hit_len", _host_hits))
        for name, hook in POLICY_HOOKS.items():
            stack.enter_context(_around(SchedulePolicy, name, hook))
        for name, hook in ALLOCATION_HOOKS.items():
            stack.enter_context(_around(schedule_batch, name, hook))
        stack.enter_context(_around(sglang_allocation, "_alloc_page_size", allocation.around_alloc_page_size))
        stack.enter_context(_around(ScheduleBatch, "check_decode_mem", hooks.around_check_decode_mem))
        stack.enter_context(_around(ScheduleBatch, "mix_with_running", _mix))
        stack.enter_context(patch("sglang_kvc.cache.runtime._current", runtime))
        yield


class Absent:
    """Stand-in for a part of the scheduler. It is false and empty, and each attribute is the stand-in itself."""

    def __getattr__(self, name):
        return self

    def __call__(self, *args, **kwargs):
        return self

    __add__ = __mod__ = __call__

    def __len__(self):
        return 0


class ModelFreeScheduler(Scheduler):
    """Scheduler for up to `rows` concurrent requests, for use in `configured`. Subclasses define `run_batch`."""

    def __init__(self, pool, allocator, tree, *, rows: int, page_size: int, chunk: int | None = None):
        self.req_to_token_pool, self.token_to_kv_pool_allocator, self.tree_cache = pool, allocator, tree
        self.running_batch, self.last_batch, self.chunked_req = ScheduleBatch(reqs=[]), None, None
        self.waiting_queue, self.result_queue = [], deque()
        self._pending_chunked_abort_req, self._engine_paused = None, False
        self.prefill_decode_interval = runtime_context.get_schedule().prefill_decode_interval or 0
        self.prefill_decode_interval_min_bs = self._prefill_decode_interval_remaining = 0
        self.server_args = runtime_context.get_server_args()
        self.page_size, self.chunked_prefill_size, self.max_prefill_tokens = page_size, chunk, 1 << 30
        self.max_running_requests, self.max_prefill_bs, self.forward_ct = rows, rows, 0
        self.policy = SchedulePolicy("fcfs", tree, False, False, False)
        self.new_token_ratio_tracker = NewTokenRatioTracker(init=0.1, min=0.02, decay=0.01, current=0.1)
        self.model_config = SimpleNamespace(
            vocab_size=1 << 20, is_encoder_decoder=False, think_end_ids=None, self_opened_think_start_ids=None
        )
        self.spec_algorithm, self.disaggregation_mode = SpeculativeAlgorithm.NONE, DisaggregationMode.NULL
        self.is_generation = self.enable_overlap = self.enable_skip_finishing_decode = True
        for name in (
            "enable_fpm", "enable_hisparse", "require_mlp_sync", "enable_priority_preemption", "is_hybrid_swa",
            "enable_hierarchical_cache", "enable_hicache_storage", "enable_lora", "enable_lmcache",
            "enable_priority_scheduling", "abort_on_priority_when_disabled", "enable_unified_cache_external_linker",
            "enable_overlap_mlx",
        ):  # fmt: skip
            setattr(self, name, False)
        self.is_mixed_chunk = chunk is not None and runtime_context.get_schedule().enable_mixed_chunk
        for name in (
            "dllm_config", "prefill_delayer", "min_free_slots_delayer", "truncation_align_size",
            "hisparse_coordinator", "priority_scheduling_preemption_threshold", "max_queued_requests",
            "scheduler_stage_metrics", "rust_server", "_pause_started_at", "decode_offload_manager",
            "dynamic_chunk_sizer",
        ):  # fmt: skip
            setattr(self, name, None)
        for name in (
            "grammar_manager", "dllm_manager", "ipc_channels", "kv_events_publisher", "load_inquirer",
            "metrics_reporter", "tp_worker", "processed_tokens_counter",
        ):  # fmt: skip
            setattr(self, name, Absent())
        self.dp_attn_adapter = SimpleNamespace(
            maybe_prepare_mlp_sync_batch=lambda batch, need_sync=None: batch,
            maybe_convert_decode_to_extend=lambda batch: batch,
        )
        self.beam_coordinator = SimpleNamespace(pending_member_rows=lambda batch: 0)
        self.ngram_embedding_manager = SimpleNamespace(prepare_for_forward=lambda batch, chunked_req=None: batch)
        self.forward_stream_ctx = contextlib.nullcontext()
        self.batch_result_processor = SchedulerBatchResultProcessor(
            is_generation=True, disaggregation_mode=self.disaggregation_mode, enable_overlap=True,
            enable_overlap_mlx=False, model_config=self.model_config,
            token_to_kv_pool_allocator=allocator, tree_cache=tree, hisparse_coordinator=None, req_to_token_pool=pool,
            decode_offload_manager=None, metrics_collector=Absent(), metrics_reporter=Absent(), draft_worker=None,
            model_worker=None, logprob_result_processor=Absent(), output_streamer=Absent(),
            beam_coordinator=self.beam_coordinator,
            abort_request=self.abort_request,
        )  # fmt: skip
