"""The CPU side of packing a one-shot prompt: the queued operations and the resulting records."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvc_kernels import ops
from kvc_kernels.store import SCRATCH_BLOCK

from . import thinning
from .blocks import State
from .one_shot import WINDOW
from .op_queue import PackPrompt, Thin

if TYPE_CHECKING:
    from .runtime import Runtime
    from .sequence import Sequence


def queue_segments(runtime: Runtime, seq: Sequence, length: int) -> None:
    """Queue the complete segments of a one-shot prompt, of which `length` tokens and then a probe are written. Nothing
    is queued if the prompt stays uncompressed until it is complete."""
    block_tokens, prompt, segment = runtime.layout.block_tokens, seq.one_shot, thinning.SEGMENT
    assert prompt is not None
    # The last queries' own tokens, and those after them, are never dropped.
    most = min(length, prompt.tokens - WINDOW - prompt.tail)
    first, end = seq.window_start, most // block_tokens // segment * segment
    if prompt.segment_blocks == thinning.UNTHINNED or end <= first:
        return
    left = np.asarray(seq.slide(end * block_tokens), dtype=np.int64)
    if prompt.segment_blocks == segment:
        runtime.queue_due(left, prompt.format_id)
        return
    if prompt.queries is None:
        raise RuntimeError("a chunk of a one-shot prompt is complete, but no forward noted its last queries")
    packed, kept_end = (place // segment * prompt.segment_blocks for place in (first, end))
    blocks = np.asarray(seq.blocks[:packed] + left.tolist() + seq.blocks[end:], dtype=np.int64)
    into, gap = np.asarray(seq.blocks[packed:kept_end], dtype=np.int64), end - kept_end
    tokens = seq.length - (first - packed) * block_tokens
    runtime.log.push(
        Thin(blocks, packed, len(left), tokens, into, prompt.format_id, prompt.queries, prompt.row, gap)
    )
    runtime.counters.compactions += len(left)
    _store(runtime, left, prompt.format_id, 0, 0)
    pages = len(into) * runtime.store.block_formats[prompt.format_id].pages
    _store(runtime, into, prompt.format_id, pages, len(left) * block_tokens)
    _open_gap(runtime, seq, kept_end, end, max(0, min(prompt.reserved, end) - kept_end))
    _drop(runtime, left[max(0, prompt.reserved - first) :])


def queue_prompt(runtime: Runtime, seq: Sequence, length: int) -> None:
    """Queue the full blocks of a complete one-shot prompt; `length` tokens in total are written. Those after the prompt
    are packed like any answer, even if they were prefilled with it."""
    block_tokens, prompt = runtime.layout.block_tokens, seq.one_shot
    assert prompt is not None
    first, full = seq.window_start, prompt.tokens // block_tokens
    left = seq.slide(length)
    assert seq.window_start >= full, "a prompt is packed before it is complete"
    seq.format_id, prompt.packed = prompt.format_id, True
    queries, prompt.queries = prompt.queries, None
    fmt = runtime.store.block_formats[seq.format_id].high
    plan = prompt.budget.plan(runtime.layout, fmt, full, prompt.tokens, prompt.tail) if full else None
    if plan is None:
        runtime.queue_due(left, seq.format_id, length if length > seq.prompt else 0)
        return
    if queries is None:
        raise RuntimeError("a one-shot prompt is complete, but no forward noted its last queries")
    if prompt.segment_blocks != thinning.UNTHINNED:
        kept_blocks = min(plan.kept_blocks, prompt.reserved)
        heads = runtime.layout.layers * runtime.layout.heads
        max_pages = kept_blocks * heads * (block_tokens // runtime.layout.page(fmt).tokens)
        plan = replace(plan, kept_blocks=kept_blocks, pages=min(plan.pages, max_pages))
    packed = seq.blocks[: prompt.first if prompt.dropped else first]
    blocks = np.asarray(packed + seq.blocks[first : -(-prompt.tokens // block_tokens)], dtype=np.int64)
    full_blocks = np.asarray(seq.blocks[:full], dtype=np.int64)
    kept, dropped = full_blocks[: plan.kept_blocks], full_blocks[plan.kept_blocks :]
    dropped = dropped[dropped != SCRATCH_BLOCK]
    stored, gap = len(packed) + full - first, full - plan.kept_blocks
    tokens = prompt.tokens - (full - stored) * block_tokens
    runtime.log.push(
        PackPrompt(blocks, len(packed), stored, tokens, kept, seq.format_id, plan, queries, prompt.row, gap)
    )
    runtime.counters.compactions += full - first
    _store(runtime, kept, seq.format_id, plan.pages, full * block_tokens)
    _open_gap(runtime, seq, plan.kept_blocks, full)
    _drop(runtime, dropped)
    runtime.queue_due(left[full - first :], seq.format_id, length)


def _store(runtime: Runtime, blocks: np.ndarray, format_id: int, pages: int, tokens: int) -> None:
    """Record that packed `blocks` hold `pages` pages in total, which stand for `tokens` tokens. The pages of each may
    depend on the data, but all of the blocks are freed together."""
    runtime.ledger.set(blocks, np.array(ops.spread(pages, len(blocks)), dtype=np.int64))
    runtime.blocks.num_tokens[blocks] = ops.spread(tokens, len(blocks))
    runtime.blocks.state[blocks] = State.PACKED
    runtime.blocks.format_id[blocks] = format_id


def _open_gap(runtime: Runtime, seq: Sequence, first: int, end: int, num_spare: int = 0) -> None:
    runtime.gap_blocks -= seq.missing
    seq.open_gap(first, end, num_spare)
    runtime.gap_blocks += seq.missing


def _drop(runtime: Runtime, blocks: np.ndarray) -> None:
    """Free `blocks`, whose pages a queued operation returns."""
    runtime.blocks.give_back(blocks)
    runtime.ledger.drop(blocks)
