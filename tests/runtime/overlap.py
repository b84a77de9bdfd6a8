"""SGLang's own scheduler and its overlap schedule over the real tree, allocator, ledger and pages, without a model.

`Overlap` is a `Scheduler` whose forwards write the rows of `record.py` instead of running a model. All else is SGLang's
code with our hooks around it: decode batches are prepared before the result of the last forward is looked at, prompts
come in chunks, requests are retracted, aborted and paused, and finish one forward late.
"""

from __future__ import annotations

import contextlib
from array import array
from collections import Counter, deque
from types import SimpleNamespace
from unittest.mock import patch

import torch
from sglang.srt import runtime_context
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import schedule_batch
from sglang.srt.managers import scheduler as scheduler_module
from sglang.srt.managers.io_struct import PauseGenerationReqInput
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req, ScheduleBatch
from sglang.srt.managers.schedule_policy import PrefillAdder, SchedulePolicy
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import NewTokenRatioTracker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from kvc_patches import admission, allocation, requests, retraction
from kvc_patches import scheduler as hooks
from sglang_kvc.adapter.allocator import KvcAllocator
from sglang_kvc.adapter.radix_cache import KvcRadixCache
from sglang_kvc.cache.page_ops import PageOps
from sglang_kvc.options.request_quality import PARAMETER

from . import record
from .audit import check_device, check_reads, check_records
from .model import CONTEXT, ROWS, P

ADDER_HOOKS = {
    "__init__": admission.around_init,
    "add_one_req": admission.around_add_one_req,
    "add_chunked_req": admission.around_add_chunked_req,
    "_get_running_request_total_token_offset": admission.around_running_offset,
}
ALLOCATION_HOOKS = {
    "alloc_for_extend": allocation.around_alloc_for_extend,
    "alloc_for_decode": allocation.around_alloc_for_decode,
    "release_req": retraction.around_release_req,
}


def _around(owner, name: str, hook):
    orig = getattr(owner, name)
    return patch.object(owner, name, lambda *args, **kwargs: hook(orig, *args, **kwargs))


def _mix(orig, batch, running_batch):
    allocation.before_mix_with_running(batch, running_batch)
    orig(batch, running_batch)


@contextlib.contextmanager
def configured(runtime, chunk: int | None, retract_every: int, mixed: bool = False):
    """Within: SGLang has the options of such a server, and our hooks stand around what is not the scheduler's own.

    A running request is retracted every `retract_every` forwards, whatever is free.
    """
    options = dict(device="cpu", attention_backend="torch_native", chunked_prefill_size=chunk or -1)
    options |= dict(enable_mixed_chunk=mixed, pp_max_micro_batch_size=ROWS)
    with contextlib.ExitStack() as stack:
        context = runtime_context.get_context()
        stack.enter_context(context.override_server_args(**options))
        for name, hook in ADDER_HOOKS.items():
            stack.enter_context(_around(PrefillAdder, name, hook))
        for name, hook in ALLOCATION_HOOKS.items():
            stack.enter_context(_around(schedule_batch, name, hook))
        stack.enter_context(_around(ScheduleBatch, "check_decode_mem", hooks.around_check_decode_mem))
        stack.enter_context(_around(ScheduleBatch, "mix_with_running", _mix))
        stack.enter_context(patch("sglang_kvc.cache.runtime._current", runtime))
        for name, value in {"TEST_RETRACT": True, "TEST_RETRACT_INTERVAL": retract_every}.items():
            stack.enter_context(patch.object(scheduler_module, name, value))
        stack.enter_context(patch.object(scheduler_module.logger, "warning", lambda *args: None))
        yield


class Absent:
    """A part of the scheduler that is not there: everything of it is itself, false and empty."""

    def __getattr__(self, name):
        return self

    def __call__(self, *args, **kwargs):
        return self

    __add__ = __mod__ = __call__

    def __len__(self):
        return 0


class Overlap(Scheduler):
    """A server of `ROWS` requests at a time; to be used within `configured`. `seen` counts what happened."""

    def __init__(self, runtime, chunk: int | None, disable: bool):
        self.runtime, self.seen = runtime, Counter()
        runtime.page_ops._compact = self._compact  # counts
        pool = ReqToTokenPool(ROWS, CONTEXT, "cpu", enable_memory_saver=False)
        allocator = KvcAllocator(runtime, SimpleNamespace(runtime=runtime), "cpu")
        tree = KvcRadixCache(CacheInitParams(disable, pool, allocator, P))
        self.requests: dict[str, Req] = {}
        self.req_to_token_pool, self.token_to_kv_pool_allocator, self.tree_cache = pool, allocator, tree
        self.running_batch, self.last_batch, self.chunked_req = ScheduleBatch(reqs=[]), None, None
        self.waiting_queue, self.result_queue = [], deque()
        self._pending_chunked_abort_req, self._engine_paused = None, False
        self.prefill_decode_interval = self.prefill_decode_interval_min_bs = self._prefill_decode_interval_remaining = 0
        self.server_args = runtime_context.get_server_args()
        self.page_size, self.chunked_prefill_size, self.max_prefill_tokens = P, chunk, 1 << 20
        self.max_running_requests, self.max_prefill_bs, self.forward_ct = ROWS, ROWS, 0
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

    # ---- clients

    def submit(self, prompt: list[int], answer: list[int], level: str | None, salt: str | None) -> None:
        """A request that will be answered with all of `answer`."""
        params = SamplingParams(max_new_tokens=len(answer), custom_params=level and {PARAMETER: level})
        params.normalize(None)
        req = Req(str(len(self.requests)), "", array("q", prompt), params, vocab_size=1 << 20)
        req.extra_key = salt
        requests.before_add_request_to_queue(self, req)
        self.seen["private"] += req.kvc_private
        req.history = record.history([*prompt, *answer], req.extra_key)
        req.answer = answer
        self.requests[req.rid] = req
        self._add_request_to_queue(req)

    def abort(self, rid: str) -> None:
        """`abort_request` knows prefixes of ids."""
        req = self.requests[rid]
        if req in self.waiting_queue:
            self.waiting_queue.remove(req)
            req.finished_reason = FINISH_ABORT()
        elif req is self.chunked_req:
            self._pending_chunked_abort_req = req
            self.seen["chunks aborted"] += 1
        else:
            req.to_finish = FINISH_ABORT()
        self.seen["aborted"] += 1

    def pause(self) -> None:
        self.pause_generation(PauseGenerationReqInput(mode="retract"))
        self._engine_paused = False
        check_records(self)
        self.seen["paused"] += 1

    @property
    def busy(self) -> bool:
        return any(not r.finished() for r in self.requests.values()) or self.last_batch is not None

    # ---- one turn of `event_loop_overlap`

    def turn(self) -> None:
        before = {r.rid: r.retraction_count for r in self.requests.values()}
        plan = self.get_next_batch_to_run(running_batch=self.running_batch, last_batch=self.last_batch)
        self.running_batch, batch = plan.running_batch, plan.batch_to_run
        self.seen["retracted"] += sum(r.retraction_count - before[r.rid] for r in self.requests.values())
        if batch:
            self.result_queue.append((batch.copy(), self.run_batch(batch)))
        if self.last_batch:
            self.process_batch_result(*self.result_queue.popleft())
        elif batch is None:
            hooks.before_on_idle(self)
        self.last_batch = batch
        check_records(self)

    def get_new_batch_prefill(self, running_batch):
        return hooks.around_get_new_batch_prefill(Scheduler.get_new_batch_prefill, self, running_batch)

    def run_batch(self, batch, pp_proxy_tensors=None):
        """The forward: what is queued runs, then new rows are written. Its result is a token for each request."""
        hooks.before_run_batch(self, batch, None)
        self.forward_ct += 1
        self._note(batch)
        self.runtime.flush()
        check_device(self.runtime)
        spans = [self._span(batch, i) for i in range(len(batch.reqs))]
        record.write(self.runtime.store, self.req_to_token_pool.req_to_token, batch.reqs, spans)
        check_reads(self, batch.reqs)
        places = [end - len(req.origin_input_ids) for req, (_, end) in zip(batch.reqs, spans)]
        tokens = [req.answer[min(max(at, 0), len(req.answer) - 1)] for req, at in zip(batch.reqs, places)]
        return GenerationBatchResult(next_token_ids=torch.tensor(tokens))

    def _note(self, batch) -> None:
        extends = batch.forward_mode.is_extend()
        self.seen["chunks"] += extends and batch.chunked_req is not None
        if extends:
            mixed = batch.decoding_reqs or []
            self.seen["mixed"] += bool(mixed)
            seqs = self.runtime.sequences_of([req.rid for req in batch.reqs])
            assert all(seq is req.kvc for seq, req in zip(seqs, batch.reqs))
            assert [seq.decoding for seq in seqs] == [req in mixed for req in batch.reqs]
        for req in batch.reqs if extends else ():
            begins = req not in mixed and req.extend_batch_idx == 1 and batch.prefix_lens[batch.reqs.index(req)] > 0
            self.seen["hits"] += begins
            self.seen["hits after a retraction"] += begins and req.retraction_count > 0

    def _compact(self, op, step: int) -> list:
        self.seen["planned again" if op.from_format else "packed"] += len(op.blocks)
        return PageOps._compact(self.runtime.page_ops, op, step)

    @staticmethod
    def _span(batch, i: int) -> tuple[int, int]:
        """First and last position that this forward writes."""
        end = int(batch.seq_lens_cpu[i])
        first = batch.prefix_lens[i] if batch.forward_mode.is_extend() else end - 1
        assert first + (batch.extend_lens[i] if batch.forward_mode.is_extend() else 1) == end
        return first, end

    def process_batch_result(self, batch, result):
        if batch.forward_mode.is_decode():
            self.batch_result_processor.process_batch_result_decode(batch, result)
        else:
            self.batch_result_processor.process_batch_result_prefill(batch, result)
        hooks.after_process_batch_result(None, self, batch, result)
