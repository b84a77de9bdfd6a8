"""`sglang.srt.mem_cache.allocation`: bind requests to the allocation that SGLang makes for a batch.

SGLang's allocator sees lengths only; ours needs the requests, whose CPU block lists decide everything, and must not be
asked for a spare block per request (at 256 tokens a block that slack would evict the cache on every decode step).
"""

from __future__ import annotations

from .registry import hook

ALLOCATION = "sglang.srt.mem_cache.allocation"


def around_alloc_for_extend(orig, batch):
    from sglang_kvc.adapter.allocator import KvcAllocator
    from sglang_kvc.options.request_quality import level

    allocator = batch.token_to_kv_pool_allocator
    if not isinstance(allocator, KvcAllocator):
        return orig(batch)
    tree, p = batch.tree_cache, allocator.page_size
    for req in batch.reqs:
        if getattr(req, "kvc", None) is None:
            done = req.cache_protected_len
            blocks = tree.path_blocks(req.last_node)[: done // p]
            req.kvc = allocator.runtime.new_sequence(blocks, done, allocator.runtime.policy.rung_of(level(req)))
    lengths = batch.seq_lens_cpu.tolist()
    for req, length in zip(batch.reqs, lengths):
        req.kvc.prompt = length
    allocator.runtime.extending = [(req.rid, req.kvc) for req in batch.reqs]
    need = allocator.blocks_missing(batch.reqs, lengths) * p
    with allocator.for_requests(batch.reqs, need):
        return orig(batch)


def around_alloc_for_decode(orig, batch, token_per_req):
    from sglang_kvc.adapter.allocator import KvcAllocator

    allocator = batch.token_to_kv_pool_allocator
    if not isinstance(allocator, KvcAllocator):
        return orig(batch, token_per_req)
    runtime, lengths = allocator.runtime, batch.seq_lens_cpu.tolist()
    for req, length in zip(batch.reqs, lengths):
        left = req.kvc.slide(length)
        if left and req.kvc.rung:
            # With overlap scheduling the first step is prepared before the result of the prefill is looked at.
            runtime.queue_due(left, req.kvc.rung, 0 if length <= req.kvc.prompt else length)
        if runtime.policy.replans and (again := req.kvc.blocks_to_replan(length)):
            runtime.replan(again, length)
    need = allocator.blocks_missing(batch.reqs, [n + token_per_req for n in lengths]) * allocator.page_size
    with allocator.for_requests(batch.reqs, need):
        return orig(batch, token_per_req)


def register() -> None:
    hook(f"{ALLOCATION}.alloc_for_extend", "around", "batch", around_alloc_for_extend)
    hook(f"{ALLOCATION}.alloc_for_decode", "around", "batch token_per_req", around_alloc_for_decode)
