"""SGLang's own scheduler with its overlap schedule over the real tree, allocator, ledger and pages, without a model.

`Overlap` is a `Scheduler` whose forwards write the rows of `record.py` instead of running a model. Everything else is
SGLang's code with our hooks around it: decode batches are prepared before the result of the last forward is processed,
prompts come in chunks, requests are retracted, aborted and paused, and finish one forward late.
"""

from __future__ import annotations

import contextlib
import itertools
from array import array
from collections import Counter
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
from sglang.srt.managers import scheduler as scheduler_module
from sglang.srt.managers.io_struct import PauseGenerationReqInput
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.runtime_context import get_serving
from sglang.srt.sampling.sampling_params import SamplingParams

from bench.scheduler import ModelFreeScheduler
from bench.scheduler import configured as scheduler_without_model
from kvc_kernels import ops
from kvc_patches import probes, requests
from kvc_patches import scheduler as hooks
from sglang_kvc.adapter import request_entry
from sglang_kvc.adapter.allocator import KvcAllocator
from sglang_kvc.adapter.attention_backend import KvcAttnBackend
from sglang_kvc.adapter.radix_cache import KvcRadixCache
from sglang_kvc.cache.host_tier import HostTier
from sglang_kvc.cache.page_ops import PageOps
from sglang_kvc.options.request_quality import PARAMETER

from . import record
from .audit import check_device, check_reads, check_records
from .model import CONTEXT, ONE_RANK, ROWS, H, L, P


@contextlib.contextmanager
def configured(
    runtime, chunk: int | None, retract_every: int, mixed: bool = False, strip: bool = False, interval: int = 0
):
    """`bench.scheduler.configured` that also retracts a running request every `retract_every` forwards, however much is
    free. `strip`: with `--strip-thinking-cache`; `interval`: `--prefill-decode-interval`."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(scheduler_without_model(runtime, rows=ROWS, chunk=chunk, mixed=mixed, interval=interval))
        stack.enter_context(get_serving().override(strip_thinking_cache=strip))
        # Numbers of private requests are part of their namespaces, which decide the rows of `record.py`.
        stack.enter_context(patch.object(request_entry, "_numbers", itertools.count()))
        for name, value in {"TEST_RETRACT": True, "TEST_RETRACT_INTERVAL": retract_every}.items():
            stack.enter_context(patch.object(scheduler_module, name, value))
        stack.enter_context(patch.object(scheduler_module.logger, "warning", lambda *args: None))
        yield


class Overlap(ModelFreeScheduler):
    """A server of `ROWS` requests at a time; to be used within `configured`. `seen` counts what happened, and every
    `check_every` forwards every row that is read is checked."""

    check_every = 1

    def __init__(
        self, runtime, chunk: int | None, disable: bool, order: str = "fcfs", context: int = CONTEXT, server_args=None,
        **tree
    ):  # fmt: skip
        self.runtime, self.seen, self.late, self.context = runtime, Counter(), 0, context
        self.read = np.full(runtime.blocks.num_blocks, -1)  # generation of each block when a counted query read it
        runtime.page_ops._compact = self._compact  # counts
        runtime.page_ops._pack_prompt = self._pack_prompt
        runtime.page_ops._thin = self._thin
        pool = ReqToTokenPool(ROWS, context, "cpu", enable_memory_saver=False)
        runtime.page_ops.gaps = ops.RowGaps(len(pool.req_to_token), torch.device("cpu"))
        allocator = KvcAllocator(runtime, SimpleNamespace(runtime=runtime), "cpu")
        tree = KvcRadixCache(CacheInitParams(disable, pool, allocator, P, **tree))
        self.requests: dict[str, Req] = {}
        self.backend = KvcAttnBackend.__new__(KvcAttnBackend)
        self.backend.runtime, self.backend.query_heads = runtime, H
        super().__init__(pool, allocator, tree, rows=ROWS, page_size=P, chunk=chunk)
        self.policy, self.processed_tokens_counter = SchedulePolicy(order, tree, False, False, False), 0
        if runtime.config.host_memory:
            tree.init_hicache(server_args or ONE_RANK, None)
            self.enable_hierarchical_cache = True
            runtime.host_tier.arrived = self._arrived
            tree._make_room = self._make_room

    def schedule_by_priority(self) -> None:
        """With `--enable-priority-scheduling`: higher values first, with preemption."""
        self.enable_priority_scheduling = self.enable_priority_preemption = True
        self.priority_scheduling_preemption_threshold, self.schedule_low_priority_values_first = 0, False
        self.policy = SchedulePolicy("fcfs", self.tree_cache, False, True, False)

    # ---- clients

    def submit(
        self, prompt: list[int], answer: list[int], level: str | None, salt: str | None, hints: dict | None = None
    ) -> None:
        """Submit a request that will be answered with all of `answer`. `hints`: its hints about later prompts."""
        custom = {**({PARAMETER: level} if level else {}), **(hints or {})}
        params = SamplingParams(max_new_tokens=len(answer), custom_params=custom or None)
        params.normalize(None)
        req = Req(str(len(self.requests)), "", array("q", prompt), params, vocab_size=1 << 20)
        req.extra_key = salt
        self.queue(req, answer)

    def queue(self, req: Req, answer: list[int]) -> None:
        """Queue one of SGLang's requests that will be answered with `answer`."""
        requests.before_add_request_to_queue(self, req)
        self.seen["private"] += req.kvc_private
        req.history = record.history([*req.origin_input_ids, *answer], req.extra_key)
        req.answer = answer
        req.reasoning_tokens = len(self.requests) % 2  # every other answer has one reasoning token
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

    def flush(self) -> bool:
        """Call `flush_cache`; True if the server was idle."""
        hooks.before_flush_cache(self)
        if not self.is_fully_idle(ignore_waiting=self._engine_paused):
            return False
        self.tree_cache.reset()
        self.req_to_token_pool.clear()
        self.token_to_kv_pool_allocator.clear()
        return True

    def pause(self) -> None:
        self.pause_generation(PauseGenerationReqInput(mode="retract"))
        self._engine_paused = False
        check_records(self)
        self.seen["paused"] += 1

    def pause_generation(self, recv_req):
        super().pause_generation(recv_req)
        hooks.after_pause_generation(None, self, recv_req)

    def demote_running(self, tokens: int) -> None:
        """Demote blocks as before a retraction, while a forward that reads them is running."""
        seqs = [r.kvc for r in self.running_batch.reqs if r.kvc is not None]
        goal = self.token_to_kv_pool_allocator.available_size() + tokens
        self.seen["demoted while running"] += self.runtime.demotion.demote_running(seqs, goal)
        check_records(self)

    @property
    def busy(self) -> bool:
        return any(not r.finished() for r in self.requests.values()) or self.last_batch is not None

    # ---- one turn of `event_loop_overlap`, or of `event_loop_normal` without `enable_overlap`

    def turn(self) -> None:
        before = {r.rid: r.retraction_count for r in self.requests.values()}
        thinned = [r for r in self.requests.values() if getattr(r, "kvc", None) is not None and r.kvc.gap]
        plan = self.get_next_batch_to_run(running_batch=self.running_batch, last_batch=self.last_batch)
        self.running_batch, batch = plan.running_batch, plan.batch_to_run
        self.seen["retracted"] += sum(r.retraction_count - before[r.rid] for r in self.requests.values())
        self.seen["retracted while thinned"] += sum(r.retraction_count > before[r.rid] for r in thinned)
        if batch:
            self.result_queue.append((batch.copy(), self.run_batch(batch)))
        if self.last_batch if self.enable_overlap else batch:
            self.process_batch_result(*self.result_queue.popleft())
        elif batch is None:
            hooks.before_on_idle(self)
        self.last_batch = batch
        check_records(self)

    def _arrived(self) -> int:
        """Loads are reported as finished in order, up to three turns late."""
        n = HostTier.arrived(self.runtime.host_tier)
        self.late = min(self.late + 1, 3) if n else 0
        ended = n if self.late >= self.forward_ct % 4 else 0
        self.seen["loaded"] += ended
        self.late = 0 if ended else self.late
        return ended

    def _make_room(self, ids: np.ndarray) -> bool:
        """Room for stored blocks can be made exactly if unlocked blocks hold enough memory."""
        reaches = self.runtime.capacity.reaches(self.runtime.host_tier.pages_of(ids), len(ids))
        made = KvcRadixCache._make_room(self.tree_cache, ids)
        assert made == reaches
        return made

    def get_new_batch_prefill(self, running_batch):
        return hooks.around_get_new_batch_prefill(Scheduler.get_new_batch_prefill, self, running_batch)

    def run_batch(self, batch, pp_proxy_tensors=None):
        """The forward: queued operations run, then new rows are written. The result is one token per request."""
        hooks.before_run_batch(self, batch, None)
        self.forward_ct += 1
        self._note(batch)
        self.runtime.flush()
        checks = self.forward_ct % self.check_every == 0
        if checks:
            check_device(self.runtime, [r for r in self.requests.values() if getattr(r, "kvc", None) is not None])
        spans = [self._span(batch, i) for i in range(len(batch.reqs))]
        numbers = [self._computed(req, *span) for req, span in zip(batch.reqs, spans)]
        record.write(self.runtime.store, self.req_to_token_pool.req_to_token, batch.reqs, spans, numbers)
        if batch.forward_mode.is_extend():
            self._observe(batch.reqs, numbers)
        self._note_reads(batch.reqs, spans)
        if checks:
            check_reads(self, batch.reqs)
        places = [end - len(req.origin_input_ids) for req, (_, end) in zip(batch.reqs, spans)]
        tokens = [req.answer[min(max(at, 0), len(req.answer) - 1)] for req, at in zip(batch.reqs, places)]
        return GenerationBatchResult(next_token_ids=torch.tensor(tokens))

    def _note(self, batch) -> None:
        extends = batch.forward_mode.is_extend()
        self.processed_tokens_counter += batch.extend_num_tokens if extends else 0
        self.seen["chunks"] += extends and batch.chunked_req is not None
        self.seen["decoded between chunks"] += not extends and self.chunked_req is not None
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

    def _note_reads(self, reqs: list[Req], spans: list[tuple[int, int]]) -> None:
        """Record the blocks that queries read which count for attention scores."""
        sampling = self.runtime.policy.score_sampling
        window = (sampling and sampling.window) or self.context
        for req, (_, end) in zip(reqs, spans):
            if req.kvc.decoding or end > len(req.full_untruncated_fill_ids) - window:
                self.read[req.kvc.blocks] = self.runtime.blocks.generation[req.kvc.blocks]

    def _compact(self, op, step: int) -> list:
        policy = self.runtime.policy
        if policy.collects_scores and op.from_format != op.to_format != policy.unplanned_format:
            assert (self.read[op.blocks] == op.generations).all(), "a block is planned without scores"
        self.seen["unread"] += int(self.runtime.blocks.unread[op.blocks].sum()) if op.from_format == 0 else 0
        kind = "packed" if not op.from_format else "planned again" if op.from_format == op.to_format else "demoted"
        if (op.from_format, op.to_format) in self.runtime.policy.moves and op.from_format != op.to_format:
            kind = "competed" if len(op.groups) else "planned late"
        self.seen[kind] += len(op.blocks)
        return PageOps._compact(self.runtime.page_ops, op, step)

    def _pack_prompt(self, op) -> None:
        self.seen["one-shot"] += 1
        self.seen["gaps"] += op.plan.kept_blocks < op.full
        PageOps._pack_prompt(self.runtime.page_ops, op)

    def _thin(self, op) -> None:
        self.seen["thinned"] += op.count
        PageOps._thin(self.runtime.page_ops, op)

    @staticmethod
    def _computed(req: Req, first: int, last: int) -> np.ndarray:
        """Histories of the tokens that a forward computes in the places `first` .. `last` - 1."""
        prompt = req.full_untruncated_fill_ids
        probe = 0 if req.kvc.decoding else req.kvc.probe_tokens(first, last, len(prompt))
        if not req.kvc.decoding:
            ids = probes.after_get_fill_ids(req.get_fill_ids(), req)
            assert ids == prompt[: last - probe] + prompt[len(prompt) - probe :], "other tokens are computed"
        return np.concatenate((req.history[first : last - probe], req.history[len(prompt) - probe : len(prompt)]))

    def _observe(self, reqs: list[Req], computed: list[np.ndarray]) -> None:
        """Let the attention backend record the last queries of one-shot prompts."""
        numbers = np.concatenate(computed)
        for rows, queries in self.backend._last_queries([req.kvc for req in reqs], list(map(len, computed))):
            for layer in range(L):
                queries.add(layer, record.queries(numbers[rows], layer), scale=0.02, logit_cap=0.0)

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
