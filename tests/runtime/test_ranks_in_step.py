"""Two tensor-parallel ranks decide alike with a floor, expected reuse and priorities, although their rows, clocks and
the ends of their loads differ."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.runtime_context import get_parallel

from sglang_kvc.adapter import tree_reuse
from sglang_kvc.cache import reuse
from sglang_kvc.cache.host_tier import HostTier
from sglang_kvc.cache.reuse import Sessions
from sglang_kvc.options.config import REUSE
from sglang_kvc.options.request_hints import DONE, TTL
from sglang_kvc.options.request_quality import LOSSLESS

from . import record, test_overlap
from .audit import _nodes
from .model import P, make_runtime
from .overlap import Overlap, configured
from .test_overlap import LADDER
from .test_starved import Peer, Starved, _finish, run_ranks

TURNS = 40
HINTS = ({}, {DONE: True}, {TTL: 0.03}, {TTL: 0.06}, {TTL: 0.12})  # the clocks advance 0.01 and 0.03 s a pass
KINDS = {
    "floor": {**LADDER},
    "reuse": {"high": "k4v4", "window": 0, "eviction": REUSE},
    "floor-reuse": {**LADDER, "eviction": REUSE},
}


def live(index: int, pipe, name: str) -> None:
    """The life of a rank, which compares its state with that of the other one after each turn. The second rank has
    other rows, a clock that is ahead and faster, and loads that end at once."""
    torch.set_num_threads(1)
    record.weights, clock, expired = index, [9000.0 * index], Counter()
    draw = random.Random(name)
    runtime, peer = make_runtime(blocks=6, host_memory=100_000, **KINDS[name]), Peer(pipe)

    def monotonic() -> float:
        clock[0] += 0.01 + 0.02 * index
        return clock[0]

    def expire(sessions, read):
        found = expire_sessions(sessions, read)
        expired["sessions"] += len(found)
        return found

    expire_sessions, Sessions.expire = Sessions.expire, expire
    test_overlap.HINTS = HINTS
    tree_reuse.time, reuse.CLOCK_CALLS = SimpleNamespace(monotonic=monotonic), 1
    with get_parallel().override(tp_rank=0, tp_size=1), configured(runtime, P, retract_every=25):
        server = Overlap(runtime, P, disable=False)
        server.check_every = 1000
        server.schedule_by_priority()
        peer.join(server)
        if index:
            runtime.host_tier.arrived = partial(HostTier.arrived, runtime.host_tier)
        client = Starved(server, 1, [])
        client.levels = (None, None, None, LOSSLESS, runtime.config.high if runtime.config.floor else None)
        for _ in range(TURNS):
            client.act()
            server.turn()
            compare(peer, server)
        _finish(server, [])
        while server.tree_cache.evictable_slots():  # in the order of demotion, then of eviction
            server.tree_cache.component.demotions.make_room(server.token_to_kv_pool_allocator.available_size() + P)
            compare(peer, server)
            if draw.random() < 0.3:
                server.tree_cache.evict(EvictParams(num_tokens=P))
                compare(peer, server)
    counters, tier, seen = runtime.counters, runtime.host_tier, server.seen + expired
    seen += Counter(demoted=counters.demoted_blocks, evicted=counters.evicted_blocks, loads=tier.loaded_blocks)
    assert not _expected(runtime.config) - seen.keys(), "this life holds too little"


def compare(peer: Peer, server: Overlap) -> None:
    """Formats and charges of all blocks, and the ranks of all nodes in the order of eviction."""
    runtime, tree = server.runtime, server.tree_cache
    priority = tree.tree_core.evictable_device_leaves.priority
    own = runtime.blocks.format_id.tolist(), runtime.ledger.charge.tolist(), [priority(n) for n in _nodes(tree)]
    local, remote = peer.both("blocks", own)
    assert local == remote, "the ranks have other blocks, or would evict others next"


def _expected(config) -> set[str]:
    floor, reuses = config.floor is not None, config.eviction == REUSE
    return {"evicted", "retracted", "loads", *(["demoted"] if floor else []), *(["sessions"] if reuses else [])}


@pytest.mark.parametrize("name", KINDS)
def test_ranks_decide_alike(name):
    run_ranks(live, name)
