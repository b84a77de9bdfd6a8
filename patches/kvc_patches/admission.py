"""`schedule_policy.PrefillAdder` and `Req`: prompts and chunks wait for the memory that they need packed.

SGLang continues a partly prefilled prompt even if no memory is free, and a failed allocation ends the scheduler. While
others decode or loads are under way, returning the request unchanged parks it for a step, together with all later
prompts (SGLang does so for hybrid models). Finished or retracted requests and finished loads then make room.

With `--kvc-running-share`, a prompt that needs an eviction waits while running requests hold more than that share.

With `--enable-mixed-chunk` the decode step of the running requests joins each prefill, and SGLang does not check its
memory. A pass therefore leaves the blocks of that step free.
"""

from __future__ import annotations

from contextlib import contextmanager

from .lookup import runtime_of
from .registry import hook

ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"
HOST_HITS = "sglang.srt.managers.schedule_batch.Req.materialized_host_hit_len"
ANY_PROMPT = 1 << 30  # tokens, more than any prompt needs
INIT = (
    "self page_size tree_cache token_to_kv_pool_allocator running_batch new_token_ratio rem_input_tokens "
    "rem_chunk_tokens num_mixed_decode_tokens priority_scheduling_preemption_threshold max_prefill_bs "
    "max_running_requests prefill_max_requests prefill_delayer_single_pass dllm_config waiting_queue_len "
    "prefill_tile_block_m"
)


@contextmanager
def _credit(adder, tokens: float):
    """Context in which the adder counts `tokens` more tokens as free."""
    adder.memory_budget.total_offset -= tokens
    try:
        yield
    finally:
        adder.memory_budget.total_offset += tokens


def around_init(
    orig, self, page_size, tree_cache, token_to_kv_pool_allocator, running_batch, new_token_ratio, rem_input_tokens,
    rem_chunk_tokens, num_mixed_decode_tokens=0, *args, **kwargs
):  # fmt: skip
    """Leave blocks, not single tokens, for a mixed decode step."""
    mixed = num_mixed_decode_tokens
    orig(
        self, page_size, tree_cache, token_to_kv_pool_allocator, running_batch, new_token_ratio, rem_input_tokens,
        rem_chunk_tokens, mixed, *args, **kwargs
    )  # fmt: skip
    self.kvc_decode_tokens = 0
    if mixed and (runtime := runtime_of(token_to_kv_pool_allocator)) is not None:
        from sglang_kvc.adapter.admission import reserve_decode_step

        reserve_decode_step(self, runtime, running_batch, mixed)
    self.kvc_running_offset = self.memory_budget.total_offset


@contextmanager
def _one_admission(adder, req):
    """Admit a request with `ignore_eos` like any other, and note it. Without a radix cache, SGLang would reserve its
    whole answer in uncompressed tokens, and one that fits only packed would wait forever."""
    params, ignore_eos = req.sampling_params, req.sampling_params.ignore_eos
    params.ignore_eos = ignore_eos and not getattr(adder.tree_cache, "disable", True)
    try:
        yield
    finally:
        params.ignore_eos = ignore_eos
    if adder.can_run_list[-1:] == [req] and not adder.tree_cache.disable:
        adder.tree_cache.note_admitted(req)


def around_add_one_req(orig, self, req, has_chunked_req, truncation_align_size):
    """Let a prompt wait for the memory that it will take packed, not uncompressed."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    from sglang_kvc.adapter import admission

    runtime = runtime_of(self.token_to_kv_pool_allocator)
    if runtime is None:
        return orig(self, req, has_chunked_req, truncation_align_size)
    if runtime.released:
        return AddReqResult.OTHER
    if admission.waits_for_running(self, runtime, req):
        return AddReqResult.NO_TOKEN
    if runtime.host_tier is not None and (wait := admission.wait_for_blocks(self, req)) is not None:
        return wait
    credit = admission.prompt_credit(self, runtime, req)
    if credit is None:
        return AddReqResult.OTHER
    with _credit(self, credit), _one_admission(self, req):
        return orig(self, req, has_chunked_req, truncation_align_size)


def around_add_chunked_req(orig, self, req):
    """Let a chunk wait for its blocks. It is not cut where SGLang would cut it to keep its reserve for answers."""
    runtime = runtime_of(self.token_to_kv_pool_allocator)
    if runtime is None:
        return orig(self, req)
    self.kvc_chunked_req = req
    others_run = self.running_batch is not None and not self.running_batch.is_empty()
    if not (others_run or getattr(self.tree_cache, "loads", None)):
        return orig(self, req)
    from sglang_kvc.adapter.admission import chunk_credit

    credit = chunk_credit(self, runtime, req)
    if credit is None:
        # No other prompt in this pass: SGLang charges a chunk of this prompt to every batch, and tracks only one
        # partly prefilled prompt.
        self.rem_chunk_tokens = 0
        return req
    with _credit(self, credit):
        return orig(self, req)


def around_preempt_to_schedule(orig, self, req):
    """Settle and demote before running requests are preempted, one at a time, for a prompt of higher priority."""
    runtime = runtime_of(self.token_to_kv_pool_allocator)
    if runtime is None:
        return orig(self, req)
    from sglang_kvc.adapter.preemption import preempt

    def preempt_one() -> bool:
        with _credit(self, ANY_PROMPT):  # SGLang takes requests until they are enough
            return orig(self, req)

    return preempt(self, runtime, req, preempt_one)


def around_running_offset(orig, self, req):
    """Return the memory that a running request may still need.

    SGLang applies its new-token ratio to answers that may end early, and reserves those of fixed length (`ignore_eos`)
    in full. Here the ratio applies to all, because an answer takes all of its memory only at its end.
    """
    growth, runtime = orig(self, req), runtime_of(self.token_to_kv_pool_allocator)
    if runtime is None:
        return growth
    from sglang_kvc.adapter.request_limits import format_id_of

    if req.sampling_params.ignore_eos:
        growth *= self.new_token_ratio
    return runtime.capacity.running_tokens(getattr(req, "kvc", None), growth, format_id_of(runtime, req))


def after_host_hits(result, self):
    """Return the tokens that were loaded for a prompt before its admission, where SGLang loads them.

    SGLang reads this only to report hits by their source."""
    return getattr(self, "kvc_host_hits", result)


def register() -> None:
    hook(f"{ADDER}.__init__", "around", INIT, around_init)
    hook(f"{ADDER}.add_one_req", "around", "self req has_chunked_req truncation_align_size", around_add_one_req)
    hook(f"{ADDER}.add_chunked_req", "around", "self req", around_add_chunked_req)
    hook(f"{ADDER}.preempt_to_schedule", "around", "self req", around_preempt_to_schedule)
    hook(f"{ADDER}._get_running_request_total_token_offset", "around", "self req", around_running_offset)
    hook(HOST_HITS, "after", "self", after_host_hits)
