"""The CPU side of packing a one-shot prompt: what is queued, and what the records say from then on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .blocks import State
from .op_queue import PackPrompt

if TYPE_CHECKING:
    from .runtime import Runtime
    from .sequence import Sequence


def queue_prompt(runtime: Runtime, seq: Sequence, length: int) -> None:
    """Queue the full blocks of a one-shot prompt, now that it and `length` tokens in total are written."""
    block_tokens, prompt = runtime.layout.block_tokens, seq.one_shot
    assert prompt is not None
    left, full = seq.slide(length), seq.prompt // block_tokens
    assert seq.window_start == len(left) >= full, "a block of the prompt was packed before it was complete"
    seq.format_id, prompt.packed = prompt.format_id, True
    queries, prompt.queries = prompt.queries, None
    fmt = runtime.store.block_formats[seq.format_id].high
    plan = prompt.budget.plan(runtime.layout, fmt, full, seq.prompt) if full else None
    if plan is None:
        runtime.queue_due(left, seq.format_id, length if length > seq.prompt else 0)
        return
    if queries is None:
        raise RuntimeError("a one-shot prompt is complete, but no forward noted its last queries")
    blocks = np.asarray(seq.blocks[: -(-seq.prompt // block_tokens)], dtype=np.int64)
    kept, dropped = blocks[: plan.kept_blocks], blocks[plan.kept_blocks : full]
    runtime.log.push(PackPrompt(blocks, full, seq.prompt, seq.format_id, plan, queries, prompt.row))
    # How many pages each block gets depends on the data, but they live and die together.
    runtime.ledger.set(kept, _shares(plan.pages, len(kept)))
    runtime.blocks.num_tokens[kept] = _shares(full * block_tokens, len(kept))
    runtime.blocks.state[kept] = State.PACKED
    runtime.blocks.format_id[kept] = seq.format_id
    runtime.counters.compactions += full
    seq.open_gap(plan.kept_blocks, full)
    runtime.gap_blocks += seq.gap
    runtime.blocks.give_back(dropped)
    runtime.ledger.drop(dropped)
    runtime.queue_due(left[full:], seq.format_id, length)


def _shares(total: int, parts: int) -> np.ndarray:
    """`total` in `parts` whole numbers, int64 `[parts]`, that differ by at most one."""
    return np.diff(np.arange(parts + 1, dtype=np.int64) * total // parts)
