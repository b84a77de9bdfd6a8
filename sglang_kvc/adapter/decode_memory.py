"""Memory for a decode step of SGLang's batch, before the scheduler retracts a request."""

from __future__ import annotations

from typing import Any

from ..cache.runtime import Runtime
from ..cache.sequence import Sequence


def sequences_of(reqs: list) -> list[Sequence]:
    """The sequences of running requests; a request that has just ended has none."""
    return [req.kvc for req in reqs if req.kvc is not None]


def has_block_per_request(runtime: Runtime, batch: Any) -> bool:
    """Whether one block per request is free, in which case the exact need is not counted.

    A step takes at most one block per request. SGLang serves beam search, with several rows per request, only with
    pages of one token.
    """
    return len(batch.reqs) * runtime.layout.block_tokens <= runtime.capacity.available_tokens()


def settle(runtime: Runtime, batch: Any) -> bool:
    """Settle queued and running compactions, and wait for loads, which lock blocks; whether there was anything to wait
    for."""
    loads = runtime.host_tier is not None and batch.tree_cache.loading_slots
    if not (loads or runtime.overcharged):
        return False
    runtime.settle()
    if loads:
        batch.tree_cache.enter_arrived()
    return True


def cancel_loads(runtime: Runtime, batch: Any) -> bool:
    """Cancel loads that have not begun, which also lock blocks; whether there were any."""
    return runtime.host_tier is not None and batch.tree_cache.cancel_queued_loads()


def end_loads(runtime: Runtime, tree: Any) -> None:
    """Cancel loads that have not begun and wait for the others: a paused scheduler checks no load, and cannot flush or
    release the cache while one is under way."""
    if runtime.host_tier is None:
        return
    tree.cancel_queued_loads()
    if tree.loads:
        runtime.settle()
        tree.enter_arrived()


def demote(runtime: Runtime, batch: Any, selected_indices: Any) -> bool:
    """Demote blocks of the running requests until the step fits; whether any moved."""
    if not runtime.demotion.enabled:
        return False
    tokens = batch.new_tokens_required_next_decode(selected_indices)
    return runtime.demotion.demote_running(sequences_of(batch.reqs), tokens)
