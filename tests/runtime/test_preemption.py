"""Preemption by priority: memory is settled and demoted first, and as few running requests as possible give way."""

from __future__ import annotations

from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import pytest
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import NewTokenRatioTracker
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.runtime_context import get_parallel

from sglang_kvc.adapter import preemption
from sglang_kvc.cache.blocks import NO_BLOCKS
from sglang_kvc.cache.host_tier import HostTier
from sglang_kvc.options.request_quality import LOSSLESS

from .memory_backend import server_args
from .model import ROWS, P, make_runtime
from .overlap import Overlap, configured
from .test_overlap import LADDER, LEANKV

CHUNK = 2 * P
MANY = 1 << 20  # tokens


@contextmanager
def busy_server(*, prompt: int = 4 * P + 5, answer: int = 60, reserve_all: bool = False, chunk: int = CHUNK, **options):
    """A server whose rows are all taken by requests of priority 0 that decode. `reserve_all`: running requests are
    expected to write all of their answers."""
    runtime = make_runtime(**options)
    rank = get_parallel().override(tp_rank=0, tp_size=1)
    with rank, configured(runtime, chunk, retract_every=10**6):
        server = Overlap(runtime, chunk, disable=False, server_args=server_args(""))
        server.schedule_by_priority()
        if reserve_all:
            server.new_token_ratio_tracker = NewTokenRatioTracker(init=1.0, min=1.0, decay=0.0, current=1.0)
        server.patient = [submit(server, i, prompt, answer, 0) for i in range(ROWS)]
        turns(server, lambda: all(r.output_ids for r in server.patient))
        assert len(server.running_batch.reqs) == ROWS
        yield server


def submit(server: Overlap, i: int, prompt: int, answer: int, priority: int, level=None):
    """Submit a prompt that shares no block with those of another number `i`."""
    server.submit([1000 * i + j for j in range(prompt)], [10**5 + 1000 * i + j for j in range(answer)], level, None)
    req = next(reversed(server.requests.values()))
    req.priority = priority
    return req


def turns(server: Overlap, done, most: int = 2000) -> None:
    for _ in range(most):
        if done():
            return
        server.turn()
    raise AssertionError("it never happens")


def preempted(server: Overlap) -> int:
    return sum(r.retraction_count for r in server.patient)


def finish(server: Overlap) -> None:
    """Every request is answered in full, and those that gave way hit the blocks that they had written."""
    gave_way = preempted(server)
    turns(server, lambda: not server.busy)
    assert all(list(r.output_ids) == r.answer for r in server.requests.values())
    assert preempted(server) == gave_way == server.seen["hits after a retraction"]


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("blocks, least", [(24, 1), (22, 2)])
def test_as_few_requests_give_way_as_packed_prompt_needs(blocks, least, known):
    """SGLang alone takes 5 of 8 requests from the larger pool if an earlier pass has counted the tokens of the prompt
    (`known`), and else one. From the smaller pool one is not enough."""
    options = {"prompt": P + 5, "answer": 5 * P, "reserve_all": True}
    with busy_server(high="k4v4", window=0, blocks=blocks, **options) as server:
        urgent = submit(server, 100, 14 * P + 3, 20, priority=1)
        if known:
            urgent.refresh_fill_ids()
        turns(server, lambda: urgent.output_ids, most=10)
        assert preempted(server) == least
        finish(server)


@pytest.mark.slow
def test_row_of_preempted_request_does_not_go_to_lower_priority():
    """Two requests are preempted for one prompt. The second row waits for one of them."""
    options = {"prompt": P + 5, "answer": 5 * P, "reserve_all": True, "chunk": 32 * P}
    with busy_server(high="k4v4", window=0, blocks=22, **options) as server:
        for req in server.patient:
            req.priority = 1
        urgent, low = submit(server, 100, 6 * P + 3, 20, priority=2), submit(server, 101, 9, 5, priority=0)
        turns(server, lambda: urgent.output_ids, most=10)
        assert preempted(server) == 2 and not hasattr(low, "kvc")  # it has never had a row
        finish(server)


@pytest.mark.parametrize("floor, most", [("k2v2", 1), (None, 2)])
def test_running_blocks_are_demoted_before_requests_give_way(floor, most):
    with busy_server(**{**LADDER, "floor": floor, "blocks": 22 if floor else 20}) as server:
        urgent, seen = submit(server, 100, 10 * P + 3, 20, priority=1), []
        release, demoted = ScheduleBatch.release_req, server.runtime.counters
        with patch.object(
            ScheduleBatch, "release_req", lambda *args: seen.append(demoted.demoted_blocks) or release(*args)
        ):
            turns(server, lambda: urgent.output_ids, most=10)
        assert len(seen) == preempted(server) == most
        assert (seen[0] > 0) == bool(floor)
        finish(server)


@pytest.mark.slow
@pytest.mark.parametrize("settles, least", [(True, 1), (False, 2)])
def test_page_counts_are_settled_before_requests_give_way(settles, least):
    """LeanKV's packing is charged its upper bound until its page count is known. The counts of the answers' blocks
    arrive late here. With them, one request makes enough room."""
    with busy_server(**LEANKV, window=0, blocks=24, prompt=3 * P + 5, answer=4 * P) as server:
        runtime = server.runtime
        harvest, settle = runtime.harvest, runtime.settle

        def settle_now() -> None:
            with patch.object(runtime, "harvest", harvest):
                settle()

        with patch.object(runtime, "harvest", lambda step: None), patch.object(runtime, "settle", settle_now):
            for _ in range(P):
                server.turn()
            assert runtime.pending and not preempted(server)
            urgent = submit(server, 100, 10 * P + 3, 20, priority=1)
            with patch.object(preemption, "settle", preemption.settle if settles else lambda *args: False):
                turns(server, lambda: urgent.output_ids, most=10)
        assert preempted(server) == least
        turns(server, lambda: not server.busy)  # the long answers also give way to each other
        assert all(list(r.output_ids) == r.answer for r in server.requests.values())


@pytest.mark.parametrize("priority", [0, 1])
def test_nothing_changes_for_prompt_that_would_not_fit(priority):
    """Of 8 requests only one has a lower priority, and it holds too little, with all that others could be demoted."""
    with busy_server(**LADDER | {"floor": "k4v4", "blocks": 22}) as server:
        for req in server.patient[1:]:
            req.priority = 1
        runtime = server.runtime
        urgent = submit(server, 100, 14 * P, 20, priority, level=LOSSLESS)
        demoted = runtime.counters.demoted_blocks
        with patch.object(type(runtime), "settle", side_effect=AssertionError):
            for _ in range(5):
                server.turn()
        assert not preempted(server) and not urgent.output_ids and runtime.counters.demoted_blocks == demoted
        finish(server)


def test_shared_blocks_make_room_only_when_last_user_gives_way():
    with busy_server(high="k4v4", window=0, blocks=22) as server:
        runtime, reqs = server.runtime, server.patient
        seqs = [reqs[0].kvc, reqs[1].kvc]
        alone = [runtime.capacity.unlocked_by_end([seq], NO_BLOCKS) for seq in seqs]
        both = runtime.capacity.unlocked_by_end(seqs, NO_BLOCKS)
        assert both == (alone[0][0] + alone[1][0], alone[0][1] + alone[1][1])
        assert both[1] == sum(len(seq.blocks) for seq in seqs)
        sharing = runtime.new_sequence(np.array(seqs[0].blocks[:3]), 3 * P)
        assert runtime.capacity.unlocked_by_end(seqs[:1], NO_BLOCKS)[1] == alone[0][1] - 3
        assert runtime.capacity.unlocked_by_end([seqs[0], sharing], NO_BLOCKS) == alone[0]
        kept = np.array(seqs[0].blocks[:1])
        assert runtime.capacity.unlocked_by_end([seqs[0], sharing], kept)[1] == alone[0][1] - 1
        sharing.release()
        finish(server)


@pytest.mark.slow
def test_no_request_gives_way_while_prompt_is_read_from_host_memory():
    """Otherwise the request that gave way would return to the row at once, and give way again in every pass."""
    with busy_server(high="k4v4", window=0, blocks=24, answer=3 * P, host_memory=2_000_000) as server:
        tree = server.tree_cache
        stored = submit(server, 100, 4 * P + 3, 2, priority=1)
        turns(server, lambda: stored.finished())
        assert preempted(server) == 1
        turns(server, lambda: len(server.running_batch.reqs) == ROWS)
        tree.evict(EvictParams(num_tokens=MANY))
        urgent = submit(server, 100, 4 * P + 4, 2, priority=1)
        with patch.object(HostTier, "arrived", return_value=0):  # the copies take long
            for _ in range(10):
                server.turn()
            assert server.tree_cache.loads and preempted(server) == 1
        turns(server, lambda: urgent.finished())
        assert preempted(server) == 2 and server.seen["loaded"]
        turns(server, lambda: not server.busy)


@pytest.mark.slow
def test_row_of_preempted_request_is_kept_while_blocks_are_read():
    """The stored blocks fit only after requests were preempted. Later prompts would take their rows, and give way
    themselves when the blocks have arrived."""
    options = {"prompt": P + 5, "answer": 5 * P, "reserve_all": True, "host_memory": 2_000_000}
    with busy_server(high="k4v4", window=0, blocks=20, **options) as server:
        stored = submit(server, 100, 6 * P + 3, 2, priority=1)
        turns(server, lambda: stored.finished())
        turns(server, lambda: len(server.running_batch.reqs) == ROWS)
        before = preempted(server)
        server.tree_cache.evict(EvictParams(num_tokens=MANY))
        urgent = submit(server, 100, 6 * P + 4, 2, priority=1)
        others = [submit(server, 200 + i, 9, 3 * P, priority=0) for i in range(2)]
        with patch.object(HostTier, "arrived", return_value=0):  # the copies take long
            for _ in range(10):
                server.turn()
            assert server.tree_cache.loads and preempted(server) > before
            assert len(server.running_batch.reqs) < ROWS
        turns(server, lambda: urgent.finished())
        assert urgent.cached_tokens == 6 * P and not any(r.retraction_count for r in others)
        turns(server, lambda: not server.busy)


@pytest.mark.slow
def test_prompt_takes_place_of_preempted_request_despite_running_share():
    """The running requests hold nearly all that the share allows, and the urgent prompt needs an eviction."""
    runtime = make_runtime(high="k4v4", window=0, blocks=22, running_share=0.35)
    rank = get_parallel().override(tp_rank=0, tp_size=1)
    with rank, configured(runtime, 2 * CHUNK, retract_every=10**6):
        server = Overlap(runtime, 2 * CHUNK, disable=False, server_args=server_args(""))
        server.check_every = 1000
        server.schedule_by_priority()
        number = ROWS
        while runtime.capacity.available_tokens() > 6 * P:  # fills the cache with unused blocks
            submit(server, number, 8 * P + 1, 1, 0)
            turns(server, lambda: not server.busy)
            number += 1
        server.patient = [submit(server, i, P + 5, 200, 0) for i in range(ROWS)]
        turns(server, lambda: all(r.output_ids for r in server.patient))
        urgent = submit(server, number, 8 * P + 3, 20, 1)
        turns(server, lambda: preempted(server) > 0, most=10)
        turns(server, lambda: bool(urgent.output_ids), most=10)
        turns(server, lambda: not server.busy)
