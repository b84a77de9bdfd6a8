"""`sglang.srt.managers.schedule_policy`: a chunked prompt waits when its next chunk has no memory.

SGLang continues a half-prefilled prompt whatever is left, and an allocation that fails ends the scheduler. While others
decode, handing the request back unchanged parks it for a step (a path SGLang has for hybrid models); finishing or
retracted requests then make room.
"""

from __future__ import annotations

from .registry import hook


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


def register() -> None:
    hook(
        "sglang.srt.managers.schedule_policy.PrefillAdder.add_chunked_req",
        "around",
        "self req",
        around_add_chunked_req,
    )
