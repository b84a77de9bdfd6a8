"""`mem_cache.allocation` and `ScheduleBatch.mix_with_running`: bind requests to the allocation that SGLang makes for a
batch.

SGLang's allocator sees lengths only. Ours needs the requests, whose CPU block lists decide everything, and must not be
asked for a spare block per request: at 128 tokens per block that slack would evict the cache on every decode step.
"""

from __future__ import annotations

from .lookup import runtime_of
from .registry import hook

ALLOCATION = "sglang.srt.mem_cache.allocation"


def around_alloc_for_extend(orig, batch):
    allocator, tree = batch.token_to_kv_pool_allocator, batch.tree_cache
    if (runtime := runtime_of(allocator)) is None:
        return orig(batch)
    lengths = batch.seq_lens_cpu.tolist()
    for req, length in zip(batch.reqs, lengths):
        if getattr(req, "kvc", None) is None:
            req.kvc = _new_sequence(runtime, tree, req)
        req.kvc.prompt, req.kvc.whole_prompt = length, len(req.full_untruncated_fill_ids)
    runtime.extending = [(req.rid, req.kvc) for req in batch.reqs]
    with allocator.for_sequences([req.kvc for req in batch.reqs], lengths):
        out = orig(batch)
    for req in batch.reqs:
        if req.kvc.one_shot is not None:
            req.kvc.one_shot.row = req.kv.req_pool_idx
    return out


def _new_sequence(runtime, tree, req):
    """The record of a request that starts, or resumes after a retraction."""
    from sglang_kvc.adapter.request_limits import budget_of, chunk_tokens, format_id_of, ranked_prompt
    from sglang_kvc.cache.one_shot import chat_tail

    format_id = format_id_of(runtime, req)
    if (budget := budget_of(req)) is not None:
        prompt = ranked_prompt(runtime, req)
        tail, written = chat_tail(prompt, req.eos_token_ids or ()), len(req.full_untruncated_fill_ids) - len(prompt)
        return runtime.new_one_shot(budget, len(prompt), format_id, chunk_tokens(runtime), tail, written)
    cached = req.kv.cache_protected_len
    blocks = tree.path_blocks(req.last_node)[: cached // runtime.layout.block_tokens]
    return runtime.new_sequence(blocks, cached, format_id)


def around_alloc_for_decode(orig, batch, token_per_req):
    from sglang_kvc.cache.packing import tokens_decoded

    allocator = batch.token_to_kv_pool_allocator
    if (runtime := runtime_of(allocator)) is None:
        return orig(batch, token_per_req)
    seqs, lengths = runtime.blocks.sequences.of(batch.reqs), batch.seq_lens_cpu.numpy()
    tokens_decoded(runtime, seqs, lengths)
    if runtime.decodes_as_extend:
        runtime.extending = [(req.rid, req.kvc) for req in batch.reqs]
    with allocator.for_sequences(seqs, lengths + token_per_req):
        return orig(batch, token_per_req)


def around_alloc_page_size(orig, batch):
    """Send our decode steps through SGLang's path for pages of one token, which does not look up last slots."""
    decodes = batch.forward_mode.is_decode() and runtime_of(batch.token_to_kv_pool_allocator) is not None
    return 1 if decodes else orig(batch)


def before_mix_with_running(self, running_batch):
    """Add the decode step of `running_batch` to the extend batch. Both were allocated just before; with DP attention,
    the decode step replaced the extend batch in `extending`."""
    if (runtime := runtime_of(self.token_to_kv_pool_allocator)) is not None:
        runtime.extending = [(req.rid, req.kvc) for req in (*self.reqs, *running_batch.reqs)]


def register() -> None:
    hook(f"{ALLOCATION}.alloc_for_extend", "around", "batch", around_alloc_for_extend)
    hook(f"{ALLOCATION}.alloc_for_decode", "around", "batch token_per_req", around_alloc_for_decode)
    hook(f"{ALLOCATION}._alloc_page_size", "around", "batch", around_alloc_page_size)
    hook(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.mix_with_running",
        "before",
        "self running_batch",
        before_mix_with_running,
    )
