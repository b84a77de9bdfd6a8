"""`schedule_policy.PrefillAdder`: prompts and chunks wait for the memory that they need packed.

SGLang continues a partly prefilled prompt even if no memory is free, and a failed allocation ends the scheduler. While
others decode, returning the request unchanged parks it for a step, together with all later prompts (SGLang does so for
hybrid models). Finished or retracted requests then make room.

With `--enable-mixed-chunk` the decode step of the running requests joins each prefill, and SGLang does not check its
memory. A pass therefore leaves the blocks of that step free.
"""

from __future__ import annotations

from contextlib import contextmanager

from .lookup import budget_of, chunk_tokens, format_id_of, runtime_of
from .registry import hook

ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"
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


def _staged(adder, runtime, req) -> int:
    """Tokens that `req` stages in this prefill. The adder lives for one pass and remembers them."""
    staged = adder.__dict__.setdefault("kvc_staged", {})
    if id(req) not in staged:
        prefix = adder.tree_cache.path_blocks(req.last_node) if runtime.capacity.sizing.staged_tokens else ()
        staged[id(req)] = runtime.capacity.staged_tokens(prefix, format_id_of(runtime, req))
    return staged[id(req)]


def around_init(
    orig, self, page_size, tree_cache, token_to_kv_pool_allocator, running_batch, new_token_ratio, rem_input_tokens,
    rem_chunk_tokens, num_mixed_decode_tokens=0, *args, **kwargs
):  # fmt: skip
    """Leave blocks, not single tokens, for a mixed decode step. The step shortens a chunk by whole blocks, so that the
    chunk ends at a block boundary. The chunk keeps at least one block, so that prompts make progress with any number of
    running requests."""
    mixed = num_mixed_decode_tokens
    orig(
        self, page_size, tree_cache, token_to_kv_pool_allocator, running_batch, new_token_ratio, rem_input_tokens,
        rem_chunk_tokens, mixed, *args, **kwargs
    )  # fmt: skip
    self.kvc_decode_tokens = 0
    if mixed and (runtime := runtime_of(token_to_kv_pool_allocator)) is not None:
        self.rem_chunk_tokens = max(self.rem_chunk_tokens // page_size, 1) * page_size
        seqs = [req.kvc for req in running_batch.reqs if req.kvc is not None]  # None: the request just ended
        self.kvc_decode_tokens = runtime.capacity.new_block_tokens(seqs, [seq.length + 1 for seq in seqs])
        self.memory_budget.total_offset += self.kvc_decode_tokens - mixed
        self.memory_budget.current_offset += self.kvc_decode_tokens - mixed


def _bring_back(adder, req):
    """SGLang's result for a prompt whose cached blocks are in files or in host memory; None: admit it without waiting
    for them.

    While the blocks are being read, the prompt is skipped and later prompts are admitted."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    from sglang_kvc.adapter.tree_host import Hit

    if adder.tree_cache.fetch(req):
        return AddReqResult.CONTINUE
    if not req.host_hit_length:
        return None
    others_run = bool(adder.can_run_list) or not (adder.running_batch is None or adder.running_batch.is_empty())
    hit = adder.tree_cache.bring_back(req, room=lambda: adder.rem_total_tokens, others_run=others_run)
    return {Hit.LOADING: AddReqResult.CONTINUE, Hit.NO_ROOM: AddReqResult.NO_TOKEN, Hit.NEVER: None}[hit]


def around_add_one_req(orig, self, req, has_chunked_req, truncation_align_size):
    """Let a prompt wait for the memory that it will take packed, not uncompressed."""
    from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS, AddReqResult

    runtime = runtime_of(self.token_to_kv_pool_allocator)
    if runtime is None:
        return orig(self, req, has_chunked_req, truncation_align_size)
    if runtime.released:
        return AddReqResult.OTHER
    if runtime.host_tier is not None:
        waits = _bring_back(self, req)
        if waits is not None:
            return waits
    new = len(req.full_untruncated_fill_ids) - req.prefix_len
    answer = min(max(req.sampling_params.max_new_tokens - len(req.output_ids), 0), CLIP_MAX_NEW_TOKENS)
    chunk = None if self.rem_chunk_tokens is None else chunk_tokens()
    need = runtime.capacity.prompt_tokens(new, answer, format_id_of(runtime, req), chunk, budget_of(req))
    admitted = (_staged(self, runtime, r) for r in self.can_run_list)
    if not runtime.capacity.may_stage(_staged(self, runtime, req), admitted):
        return AddReqResult.OTHER
    with _credit(self, new + answer - need):
        return orig(self, req, has_chunked_req, truncation_align_size)


def around_add_chunked_req(orig, self, req):
    """Let a chunk wait for its blocks. It is not cut where SGLang would cut it to keep its reserve for answers."""
    runtime = runtime_of(self.token_to_kv_pool_allocator)
    if runtime is None or self.running_batch is None or self.running_batch.is_empty():
        return orig(self, req)
    end = min(len(req.full_untruncated_fill_ids), req.prefix_len + self.rem_chunk_tokens)
    need = runtime.capacity.new_block_tokens([req.kvc], [end]) + self.kvc_decode_tokens
    shortage = self.rem_chunk_tokens - int(self.rem_total_tokens)
    packs_at_end = req.kvc.one_shot is not None and not req.kvc.one_shot.segment_blocks
    credit = runtime.capacity.chunk_credit(need, shortage, len(self.running_batch.reqs), packs_at_end)
    if credit is None:
        # No other prompt in this pass: SGLang charges a chunk of this prompt to every batch, and tracks only one
        # partly prefilled prompt.
        self.rem_chunk_tokens = 0
        return req
    with _credit(self, credit):
        return orig(self, req)


def around_running_offset(orig, self, req):
    """Return the memory that a running request may still need."""
    growth, runtime = orig(self, req), runtime_of(self.token_to_kv_pool_allocator)
    if runtime is None:
        return growth
    return runtime.capacity.running_tokens(getattr(req, "kvc", None), growth, format_id_of(runtime, req))


def register() -> None:
    hook(f"{ADDER}.__init__", "around", INIT, around_init)
    hook(f"{ADDER}.add_one_req", "around", "self req has_chunked_req truncation_align_size", around_add_one_req)
    hook(f"{ADDER}.add_chunked_req", "around", "self req", around_add_chunked_req)
    hook(f"{ADDER}._get_running_request_total_token_offset", "around", "self req", around_running_offset)
