"""`sglang.srt.managers.schedule_policy`: the room that requests still need, and a prompt that waits for memory.

SGLang continues a half-prefilled prompt whatever is left, and an allocation that fails ends the scheduler. While others
decode, handing the request back unchanged parks it for a step (a path SGLang has for hybrid models), and with it all
prompts behind it; finishing or retracted requests then make room.

Blocks of a cached prefix that a running request's window keeps uncompressed are staged by a prefill behind it, for all
of its prompts at once. A prompt whose staging would exceed the reserved memory waits for the next pass; one prompt
alone is always admitted.
"""

from __future__ import annotations

from contextlib import contextmanager

from .registry import hook

ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"


@contextmanager
def _counting(adder, tokens: float):
    """Within: the adder takes `tokens` more as free than it would count."""
    adder.rem_total_token_offset -= tokens
    try:
        yield
    finally:
        adder.rem_total_token_offset += tokens


def _staged(adder, req) -> int:
    """Tokens that `req` stages, if it comes in; the adder, which lives for one pass, remembers them."""
    from sglang_kvc.options.request_quality import level

    runtime, known = adder.token_to_kv_pool_allocator.runtime, adder.__dict__.setdefault("kvc_staged", {})
    if id(req) not in known:
        prefix = adder.tree_cache.path_blocks(req.last_node) if runtime.sizing.staged_tokens else ()
        known[id(req)] = runtime.staged_tokens(prefix, runtime.policy.rung_of(level(req)))
    return known[id(req)]


def around_add_one_req(orig, self, req, has_chunked_req, truncation_align_size):
    """A prompt waits for the memory that it will take, not for what it would take uncompressed."""
    from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS, AddReqResult
    from sglang.srt.runtime_context import get_schedule

    from sglang_kvc.adapter.allocator import KvcAllocator
    from sglang_kvc.options.request_quality import level

    allocator = self.token_to_kv_pool_allocator
    if not isinstance(allocator, KvcAllocator):
        return orig(self, req, has_chunked_req, truncation_align_size)
    runtime = allocator.runtime
    new = len(req.full_untruncated_fill_ids) - len(req.prefix_indices)
    answer = min(max(req.sampling_params.max_new_tokens - len(req.output_ids), 0), CLIP_MAX_NEW_TOKENS)
    chunk = None if self.rem_chunk_tokens is None else get_schedule().chunked_prefill_size
    need = runtime.prompt_tokens(new, answer, runtime.policy.rung_of(level(req)), chunk)
    staged = _staged(self, req)
    if staged and self.can_run_list:
        if sum(_staged(self, r) for r in self.can_run_list) + staged > runtime.sizing.staged_tokens:
            return AddReqResult.OTHER
    with _counting(self, new + answer - need):
        return orig(self, req, has_chunked_req, truncation_align_size)


def around_add_chunked_req(orig, self, req):
    from sglang_kvc.adapter.allocator import KvcAllocator

    allocator = self.token_to_kv_pool_allocator
    if not isinstance(allocator, KvcAllocator) or self.running_batch is None or self.running_batch.is_empty():
        return orig(self, req)
    done = len(req.prefix_indices)
    end = min(len(req.full_untruncated_fill_ids), done + self.rem_chunk_tokens)
    need = allocator.blocks_missing([req], [end]) * allocator.page_size
    room = allocator.available_size() + self.tree_cache.evictable_size()
    if need > room:
        # No other prompt in this pass: SGLang counts a chunk of this one with every batch, and knows one at a time.
        self.rem_chunk_tokens = 0
        return req
    # SGLang shortens a chunk to what its reserve for answers leaves. A chunk draws on that only until it is packed, so
    # it stays whole while each running request still finds a block.
    short = max(0, self.rem_chunk_tokens - int(self.rem_total_tokens))
    whole = need + len(self.running_batch.reqs) * allocator.page_size <= room
    with _counting(self, short if whole and not allocator.runtime.prompt_at_once else 0):
        return orig(self, req)


def around_running_offset(orig, self, req):
    """Room that a running request may still need: one more open block in full, what grows beyond it packed."""
    from sglang_kvc.adapter.allocator import KvcAllocator
    from sglang_kvc.options.request_quality import level

    growth, allocator = orig(self, req), self.token_to_kv_pool_allocator
    # Asked of the request, not of its sequence: one that just ended is still in the batch, without a sequence.
    if not isinstance(allocator, KvcAllocator):
        return growth
    runtime, seq = allocator.runtime, getattr(req, "kvc", None)
    window = runtime.config.window
    held = seq.open_tokens() if window and seq is not None else window
    return runtime.growth_tokens(growth, runtime.policy.rung_of(level(req)), held)


def register() -> None:
    hook(f"{ADDER}.add_one_req", "around", "self req has_chunked_req truncation_align_size", around_add_one_req)
    hook(f"{ADDER}.add_chunked_req", "around", "self req", around_add_chunked_req)
    hook(f"{ADDER}._get_running_request_total_token_offset", "around", "self req", around_running_offset)
