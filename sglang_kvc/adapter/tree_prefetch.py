"""Prefetch: stored blocks of waiting prompts come back before the scheduler reaches these prompts.

The scheduler looks at waiting prompts in order and stops at the first one that it cannot admit, or when a chunk of a
long prompt fills the pass. A load that began only then would add its time to the time to first token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .tree_host import Hit

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from .radix_cache import KvcRadixCache

# Prompts at the head of the queue. A load may evict blocks that later prompts hit, so few are loaded ahead.
PREFETCHED = 2


def prefetch(tree: KvcRadixCache, waiting: Sequence[Req], room: Callable[[], float]) -> None:
    """Ask for reads and loads for the first waiting prompts, once for each. A prompt whose blocks do not fit is tried
    again when memory has become free, and a prompt whose load was canceled unless memory has become scarcer.

    room: function that gives the tokens of memory that no running request may need.
    """
    capacity = tree.runtime.capacity
    for req in waiting[:PREFETCHED]:
        if req.kvc_private or getattr(req, "kvc_prefetched", None) == tree.loads_canceled:
            continue
        req.init_next_round_input(tree)  # also marks the path as used, so that its blocks are not evicted first
        # Running requests take memory and give some of it back. More than the least room since the refusal is enough
        # to try again.
        least, reachable = getattr(req, "kvc_least_room", None), capacity.reachable_tokens()
        if least is not None and reachable <= least:
            req.kvc_least_room = reachable
            continue
        req.kvc_least_room = None
        if tree.fetch(req):
            continue  # matched again when the files are read
        hit = Hit.LOADING
        if req.host_hit_length:
            hit = tree.bring_back(req, room=lambda: room() - tree.queued_load_tokens, others_run=True)
        req.kvc_prefetched = None if hit is Hit.NO_ROOM else tree.loads_canceled
        req.kvc_least_room = capacity.reachable_tokens() - tree.queued_load_tokens
