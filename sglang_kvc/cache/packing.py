"""When a block is packed: the blocks that are due after a prefill, before a decode step, and at a request's end."""

from __future__ import annotations

from collections import defaultdict
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from .blocks import NO_BLOCKS
from .prompt_packing import queue_prompt, queue_segments

if TYPE_CHECKING:
    from .runtime import Runtime
    from .sequence import Sequence


class Phase(Enum):
    """Event at which written tokens are reported."""

    CHUNK = "chunk"  # a part of the prompt is prefilled, and more follows
    PREFILL = "prefill"  # the prompt is prefilled
    END = "end"  # the request ends: finished, aborted or retracted


def tokens_written(
    runtime: Runtime, seq: Sequence, length: int, phase: Phase, kept: list[int] | np.ndarray = NO_BLOCKS
) -> None:
    """Queue the blocks that are due for packing now that `length` tokens of `seq` are written.

    This and `tokens_decoded` alone decide when a block is packed:

    * CHUNK, PREFILL: blocks that left the recent window, planned as a prompt (N = 0). If attention from later tokens
      decides what they keep, they are packed with all their tokens after a chunk and planned after the prefill.
    * A decode step: blocks that left the window since the last step, planned by N = `length`. With overlap
      scheduling the first step is prepared before the result of the prefill is processed; up to the prompt's length
      N = 0. If the policy plans again, also the packed blocks whose turn it is.
    * END: the full blocks that the tree keeps, `kept`, including those of the window. `length` is 0 if nothing was
      generated.

    With a lag, packing and planning are two events for blocks of an answer, too (`replanning`).

    The first event after its end packs a one-shot prompt as one operation. If it does not fit uncompressed,
    segments are also packed after each chunk. Its answer follows the rules above.
    """
    if phase is Phase.END:
        runtime.queue_due(kept, seq.format_id, length)
        runtime.replanning.queue_ended(kept, length)
    elif seq.packs_at_end:
        if phase is Phase.PREFILL:
            queue_prompt(runtime, seq, length)
        else:
            queue_segments(runtime, seq, length)
    elif phase is Phase.CHUNK and seq.format_id and runtime.policy.unplanned_format:
        held = seq.hold(length)
        to_format = runtime.policy.unplanned_format
        runtime.queue_move(held, from_format=0, to_format=to_format, lengths=np.zeros_like(held))
    else:
        due, unplanned = runtime.replanning.slide(seq, length)
        runtime.queue_due(due, seq.format_id)
        runtime.replanning.queue_held(due)
        runtime.queue_due(unplanned, runtime.policy.unplanned_format)


def tokens_decoded(runtime: Runtime, seqs: list[Sequence], lengths: np.ndarray) -> None:
    """Queue the blocks that are due for packing before the next decode step of `seqs`, of which `lengths` tokens
    are written (int64 `[n]`). See `tokens_written`.

    Takes a few operations for any number of sequences, and more for each sequence whose window moves."""
    if runtime.running_share.decode(len(seqs)):
        runtime.capacity.forget_refusal()  # prompts that waited for running requests may fit
    table, unplanned = runtime.blocks.sequences, runtime.policy.unplanned_format
    left: dict[int, dict[int, int]] = defaultdict(dict)  # N of each block, by format
    for i in (lengths >= table.due[table.rows_of(seqs)]).nonzero()[0].tolist():
        seq, length = seqs[i], int(lengths[i])
        if seq.packs_at_end:
            queue_prompt(runtime, seq, length)
            continue
        n = length if length > seq.prompt else 0
        for format_id, ids in zip((seq.format_id, unplanned), runtime.replanning.slide(seq, length)):
            for block in ids:  # if several sequences leave a shared block in one step, the last one decides
                left[format_id].pop(block, None)
                left[format_id][block] = n
    for format_id, blocks in left.items():
        ids, lengths_then = list(blocks), np.array(list(blocks.values()))
        runtime.queue_due(ids, format_id, lengths_then)
        if format_id != unplanned:
            runtime.replanning.queue_held(ids, lengths_then)
    runtime.replanning.queue_turns(seqs, lengths)
