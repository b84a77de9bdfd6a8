"""Preemption (`--enable-priority-scheduling`): how a waiting prompt gets memory before running requests are preempted.

SGLang compares the uncompressed size of the prompt with the tokens that the running requests may still write. Here the
prompt needs its packed size, and a preempted request also unlocks the blocks that it holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.runtime_context import get_schedule

from ..cache.blocks import NO_BLOCKS
from ..cache.runtime import Runtime
from .admission import prompt_need, wait_for_blocks
from .decode_memory import sequences_of, settle

if TYPE_CHECKING:
    from collections.abc import Callable


def preempt(adder: Any, runtime: Runtime, req: Any, preempt_one: Callable[[], bool]) -> bool:
    """Make room for the waiting `req`; whether SGLang may try to admit it.

    Nothing changes unless memory can suffice. First queued compactions are settled, then blocks of the running requests
    are demoted, then requests of lower priority are preempted one by one. SGLang asks when no row is free, so at least
    one of them is preempted, unless an earlier prompt of this pass left a row.

    preempt_one: preempts the request that SGLang chooses first; returns whether there was one.
    """
    if adder.rem_chunk_tokens == 0:  # a chunk waits, and no prompt is admitted in this pass
        return False
    req.init_next_round_input(adder.tree_cache)
    if runtime.host_tier is not None and wait_for_blocks(adder, req) not in (None, AddReqResult.NO_TOKEN):
        return False  # the row of a preempted request would go to another prompt while the blocks are being read
    with adder._lock_node(req.last_node):  # its cached blocks make no room
        need = prompt_need(adder, runtime, req)
        if need is None:
            return False
        if _has_row(adder) and _fits(adder, runtime, need):
            admits = all(_above(req, other) >= 0 for other in adder.preempt_list)  # these wait again, for a row, too
            adder.kvc_row_for = req if admits else None
            return admits
        lower = _of_lower_priority(adder, req)
        if not lower or not _fits_without(lower, adder, runtime, req, need):
            return False
        if not _fits(adder, runtime, need) and not (settle(runtime, adder) and _fits(adder, runtime, need)):
            tokens = int(_goal(adder, need)) + 1
            runtime.demotion.demote_running(sequences_of(adder.running_batch.reqs), tokens, evict=True)
        while not (_has_row(adder) and _fits(adder, runtime, need)) and preempt_one():
            pass
        req.kvc_keeps_row = _has_row(adder)  # the load of its blocks may begin after this
        adder.kvc_row_for = req if req.kvc_keeps_row else None
        return req.kvc_keeps_row


def _has_row(adder: Any) -> bool:
    """Whether a request that was preempted in this pass has left a row. The adder lives for one pass, and all rows are
    taken when SGLang first asks it to preempt."""
    before = adder.__dict__.setdefault("kvc_admitted", len(adder.can_run_list))
    return len(adder.preempt_list) > len(adder.can_run_list) - before


def _goal(adder: Any, need: float) -> float:
    """Reachable tokens beyond which SGLang admits a prompt that needs `need` tokens."""
    return need + adder.per_req_token_overhead + adder.memory_budget.total_offset


def _fits(adder: Any, runtime: Runtime, need: float) -> bool:
    return _goal(adder, need) < runtime.capacity.reachable_tokens()


def _fits_without(lower: list, adder: Any, runtime: Runtime, req: Any, need: float) -> bool:
    """Whether the prompt fits if the requests `lower` are preempted and blocks of all others are demoted."""
    locked = [adder.tree_cache.path_blocks(r.last_node) for r in (req, *adder.can_run_list)]
    pages, blocks = runtime.capacity.unlocked_by_end(sequences_of(lower), np.concatenate([NO_BLOCKS, *locked]))
    pages += runtime.demotion.spare_pages(sequences_of([r for r in adder.running_batch.reqs if r not in lower]))
    growth = sum(adder._get_running_request_total_token_offset(r) for r in lower)
    return _goal(adder, need) - growth < runtime.capacity.reachable_tokens(pages, blocks)


def _of_lower_priority(adder: Any, req: Any) -> list:
    """The running requests that SGLang may preempt for `req`."""
    running = [r for r in adder.running_batch.reqs if r not in adder.preempt_list and not r.finished()]
    return [r for r in running if _above(req, r) > adder.priority_scheduling_preemption_threshold]


def _above(req: Any, other: Any) -> int:
    """How much SGLang prefers `req` to `other`."""
    sign = -1 if get_schedule().schedule_low_priority_values_first else 1
    return (req.priority - other.priority) * sign
