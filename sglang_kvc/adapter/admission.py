"""Admission of prompts and chunks by SGLang's `PrefillAdder` (`adder`): the memory that they need packed."""

from __future__ import annotations

import math
from typing import Any

from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS, AddReqResult
from sglang.srt.runtime_context import get_schedule

from ..cache.blocks import NO_BLOCKS
from ..cache.running_share import PATIENCE
from ..cache.runtime import Runtime
from .decode_memory import sequences_of
from .hit_sources import count_hits
from .request_limits import budget_of, chunk_tokens, format_id_of, ranked_prompt
from .tree_host import Hit


def reserve_decode_step(adder: Any, runtime: Runtime, running_batch: Any, mixed: int) -> None:
    """Reserve the blocks of a decode step that joins the prefill, in place of its `mixed` tokens.

    The step shortens a chunk by whole blocks, so that the chunk ends at a block boundary. The chunk keeps at least one
    block, so that prompts make progress with any number of running requests.
    """
    page_size = adder.page_size
    adder.rem_chunk_tokens = max(adder.rem_chunk_tokens // page_size, 1) * page_size
    seqs = sequences_of(running_batch.reqs)
    adder.kvc_decode_tokens = runtime.capacity.new_block_tokens(seqs, [seq.length + 1 for seq in seqs])
    adder.memory_budget.total_offset += adder.kvc_decode_tokens - mixed
    adder.memory_budget.current_offset += adder.kvc_decode_tokens - mixed


def wait_for_blocks(adder: Any, req: Any) -> AddReqResult | None:
    """SGLang's result for a prompt whose cached blocks are in files or in host memory; None: admit it with those that
    are on the device."""
    wait = _transfer_blocks(adder, req)
    if wait is None:
        count_hits(req)
    return wait


def _transfer_blocks(adder: Any, req: Any) -> AddReqResult | None:
    """Begin or check the transfer of the prompt's blocks; the result is that of `wait_for_blocks`.

    While the blocks are being read, the prompt is skipped and later prompts are admitted. If requests were preempted
    for it, later prompts wait, too, because they would take its row."""
    tree = adder.tree_cache
    req.kvc_waits_for = tree.transfers_ended  # if it waits: until more have ended
    if tree.fetch(req):
        return AddReqResult.CONTINUE
    if not req.host_hit_length:
        req.kvc_keeps_row, req.kvc_waits_for = False, None
        return None
    others_run = bool(adder.can_run_list) or not (adder.running_batch is None or adder.running_batch.is_empty())
    queued = tree.queued_load_tokens
    rest = _rest_of_chunked(adder, tree.runtime)
    hit = tree.bring_back(req, room=lambda: adder.rem_total_tokens - rest, others_run=others_run)
    claimed = tree.queued_load_tokens - queued  # later prompts must not take the memory of this load
    adder.memory_budget.total_offset += claimed
    adder.memory_budget.current_offset += claimed
    keeps_row = hit is Hit.LOADING and getattr(req, "kvc_keeps_row", False)
    req.kvc_keeps_row = keeps_row
    if hit is not Hit.LOADING:
        req.kvc_waits_for = None
    loading = AddReqResult.OTHER if keeps_row else AddReqResult.CONTINUE
    return {Hit.LOADING: loading, Hit.NO_ROOM: AddReqResult.NO_TOKEN, Hit.NEVER: None}[hit]


def _rest_of_chunked(adder: Any, runtime: Runtime) -> float:
    """Tokens of memory that a partly prefilled prompt needs after this pass."""
    req = getattr(adder, "kvc_chunked_req", None)
    if req is None:
        return 0.0
    done = req.extend_end if adder.can_run_list[:1] == [req] else req.kvc.length
    rest = len(req.full_untruncated_fill_ids) - done
    if not rest:
        return 0.0
    answer = _uncompressed(req)[1]
    return runtime.capacity.rest_tokens(req.kvc, rest, answer, format_id_of(runtime, req), chunk_tokens(runtime))


def waits_for_running(adder: Any, runtime: Runtime, req: Any) -> bool:
    """Whether a prompt waits until running requests end, because of `--kvc-running-share`: it needs an eviction, and
    with it they would hold more than that share of the memory.

    Decode steps stall while prompts are computed, so requests that compute much run for long, and hold memory that
    evicted sessions need when they return. A prompt whose blocks are being loaded has passed before, and one for which
    requests were preempted takes their place. A prompt that other prompts pass for long no longer waits."""
    share, running = runtime.running_share.now, adder.running_batch
    if share == 1 or getattr(req, "kvc_waits_for", None) is not None or getattr(adder, "kvc_row_for", None) is req:
        return False
    if not adder.can_run_list and (running is None or running.is_empty()):
        return False
    need, capacity = prompt_need(adder, runtime, req), runtime.capacity
    claimed = adder.memory_budget.total_offset - adder.kvc_running_offset
    if need is None or need + claimed <= capacity.available_tokens():
        return False
    if budget_of(req) is None:  # `need` also has the chunks that are uncompressed at a time
        new, answer = _uncompressed(req)
        need = capacity.growth_tokens(new + answer * adder.new_token_ratio, format_id_of(runtime, req), 0)
    if not capacity.crowds(share, need, adder.tree_cache.path_blocks(req.last_node), claimed):
        return False
    admitted = runtime.running_share.admitted
    req.kvc_crowded_since = getattr(req, "kvc_crowded_since", admitted)
    return admitted - req.kvc_crowded_since < PATIENCE


def prompt_credit(adder: Any, runtime: Runtime, req: Any) -> int | float | None:
    """Tokens that a prompt with its answer needs less when packed than uncompressed; None if it cannot be staged in
    this prefill."""
    need = prompt_need(adder, runtime, req)
    return None if need is None else sum(_uncompressed(req)) - need


def prompt_need(adder: Any, runtime: Runtime, req: Any) -> float | None:
    """Tokens of memory that a prompt with its answer needs, and that running requests need in addition while it is
    prefilled; None if it cannot be staged in this prefill."""
    admitted = (_staged(adder, runtime, r) for r in adder.can_run_list)
    if not runtime.capacity.may_stage(_staged(adder, runtime, req), admitted):
        return None
    chunk = None if adder.rem_chunk_tokens is None else chunk_tokens(runtime)
    budget, all_tokens = budget_of(req), len(req.full_untruncated_fill_ids)
    written = all_tokens - len(ranked_prompt(runtime, req)) if budget else 0
    new, answer = _uncompressed(req)
    need = runtime.capacity.prompt_tokens(new, answer, format_id_of(runtime, req), chunk, budget, written)
    return need + _growth_between_chunks(adder, runtime, new)


def _growth_between_chunks(adder: Any, runtime: Runtime, new: int) -> float:
    """Tokens of memory that running requests need beyond their reserve in the decode steps between the chunks of a
    prompt of `new` tokens (`--prefill-decode-interval`). A partly prefilled prompt cannot give way to them."""
    interval, chunk, left = get_schedule().prefill_decode_interval, chunk_tokens(runtime), adder.rem_chunk_tokens
    if not interval or chunk is None or left is None or new <= left or adder.running_batch is None:
        return 0.0
    steps, extra = interval * -(-new // chunk), 0.0
    for r in adder.running_batch.reqs:
        rest, format_id = _uncompressed(r)[1], format_id_of(runtime, r)
        reserved, seq = rest * adder.new_token_ratio, getattr(r, "kvc", None)
        if min(rest, steps) > reserved:
            extra += runtime.capacity.running_tokens(seq, min(rest, steps), format_id)
            extra -= runtime.capacity.running_tokens(seq, reserved, format_id)
    return extra


def _uncompressed(req: Any) -> tuple[int, int]:
    """Tokens that SGLang counts for the uncached part of a prompt and for its answer."""
    new = len(req.full_untruncated_fill_ids) - req.prefix_len
    return new, min(max(req.sampling_params.max_new_tokens - len(req.output_ids), 0), CLIP_MAX_NEW_TOKENS)


def chunk_credit(adder: Any, runtime: Runtime, req: Any) -> int | None:
    """Tokens to credit for the next chunk of a prompt; None: the chunk waits for its blocks."""
    end = min(len(req.full_untruncated_fill_ids), req.prefix_len + adder.rem_chunk_tokens)
    need = runtime.capacity.new_block_tokens([req.kvc], [end]) + adder.kvc_decode_tokens
    shortage = adder.rem_chunk_tokens - math.floor(adder.rem_total_tokens)
    running = 0 if adder.running_batch is None else len(adder.running_batch.reqs)
    return runtime.capacity.chunk_credit(need, shortage, running, req.kvc.stays_uncompressed)


def _staged(adder: Any, runtime: Runtime, req: Any) -> int:
    """Tokens that `req` stages in this prefill. The adder lives for one pass and remembers them."""
    staged = adder.__dict__.setdefault("kvc_staged", {})
    if id(req) not in staged:
        prefix = adder.tree_cache.path_blocks(req.last_node) if runtime.capacity.sizing.staged_tokens else NO_BLOCKS
        staged[id(req)] = runtime.capacity.staged_tokens(prefix, format_id_of(runtime, req))
    return staged[id(req)]
