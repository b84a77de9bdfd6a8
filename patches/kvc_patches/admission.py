"""`sglang.srt.managers.schedule_policy`: what running requests may still need, and a prompt that waits for memory.

SGLang continues a half-prefilled prompt whatever is left, and an allocation that fails ends the scheduler. While others
decode, handing the request back unchanged parks it for a step (a path SGLang has for hybrid models); finishing or
retracted requests then make room.
"""

from __future__ import annotations

from .registry import hook

ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"


def around_add_chunked_req(orig, self, req):
    from sglang_kvc.allocator import KvcAllocator

    allocator = self.token_to_kv_pool_allocator
    if not isinstance(allocator, KvcAllocator) or self.running_batch is None or self.running_batch.is_empty():
        return orig(self, req)
    done = len(req.prefix_indices)
    end = min(len(req.full_untruncated_fill_ids), done + self.rem_chunk_tokens)
    need = allocator.blocks_missing([req], [end]) * allocator.page_size
    if need > allocator.available_size() + self.tree_cache.evictable_size():
        return req
    return orig(self, req)


def around_running_offset(orig, self, req):
    """Room that a running request may still need: one more open block in full, what grows beyond it packed."""
    from sglang_kvc.allocator import KvcAllocator
    from sglang_kvc.levels import level

    growth, allocator = orig(self, req), self.token_to_kv_pool_allocator
    # Asked of the request, not of its sequence: one that just ended is still in the batch, without a sequence.
    if not isinstance(allocator, KvcAllocator):
        return growth
    runtime = allocator.runtime
    return runtime.growth_tokens(growth, runtime.policy.rung_of(level(req)))


def register() -> None:
    hook(f"{ADDER}.add_chunked_req", "around", "self req", around_add_chunked_req)
    hook(f"{ADDER}._get_running_request_total_token_offset", "around", "self req", around_running_offset)
