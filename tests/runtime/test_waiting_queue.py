"""Scheduling passes while all waiting prompts wait for their stored blocks."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_kvc.adapter.tree_disk import DiskCache
from sglang_kvc.adapter.waiting_queue import MOST_LEFT_OUT, all_wait_for_blocks

from .model import P, make_runtime
from .overlap import Overlap, configured
from .test_prefetch import turns_until

PREFIXES = [[*range(i * 1000, i * 1000 + 3 * P), 1] for i in range(2)]  # their three full blocks are in host memory
PROMPT = [100_000 + i for i in range(5)]


class Server:
    """A request decodes and the first stored prompt waits for its load. `arrivals` loads may end."""

    def __init__(self, monkeypatch):
        self.runtime = runtime = make_runtime(blocks=40, high="k4v4", window=0, host_memory=2_000_000)
        self.configured = configured(runtime, 4 * P, retract_every=10**6)
        self.configured.__enter__()
        self.server = server = Overlap(runtime, 4 * P, disable=False)
        server.check_every = 1000
        for prefix in PREFIXES:
            self.ends(self.submit(prefix))
        server.tree_cache.evict(EvictParams(num_tokens=10**9))
        assert runtime.host_tier.stored == 6
        arrived, take_arrived = runtime.host_tier.arrived, runtime.host_tier.take_arrived
        self.arrivals = self.passes = 0

        def taken():
            self.arrivals -= 1
            take_arrived()

        monkeypatch.setattr(runtime.host_tier, "arrived", lambda: min(arrived(), self.arrivals))
        monkeypatch.setattr(runtime.host_tier, "take_arrived", taken)
        calc_priority = SchedulePolicy.calc_priority

        def counted(*args, **kwargs):
            self.passes += 1
            return calc_priority(*args, **kwargs)

        monkeypatch.setattr(SchedulePolicy, "calc_priority", counted)
        self.submit(PROMPT, 190)
        self.turns(4)
        self.hit = self.submit(PREFIXES[0])
        self.turns(4)
        assert len(server.tree_cache.loads) == 1

    def submit(self, prompt: list[int], answer: int = 1):
        self.server.submit(prompt, [5000 + i for i in range(answer)], None, None)
        return list(self.server.requests.values())[-1]

    def turns(self, n: int) -> int:
        """Run `n` turns; return the number of passes over the queue."""
        before = self.passes
        for _ in range(n):
            self.server.turn()
        return self.passes - before

    def ends(self, req) -> int:
        """Run turns until `req` has ended; return their number."""
        return turns_until(self.server, req.finished)


@pytest.fixture
def server(monkeypatch):
    made = Server(monkeypatch)
    yield made
    made.configured.__exit__(None, None, None)


def test_few_passes_until_the_load_ends(server):
    assert server.turns(3 * (MOST_LEFT_OUT + 1)) == 3 and not server.hit.output_ids
    server.arrivals = 1
    assert server.ends(server.hit) < 5
    assert server.hit.cached_tokens == 3 * P


def test_prefix_of_waiting_prompt_counts_as_used(server):
    """A prompt that ends while another one waits is not the more recent one."""
    core, other = server.server.tree_cache.tree_core, server.submit([*range(300_000, 300_000 + 2 * P)])
    server.ends(other)
    server.turns(MOST_LEFT_OUT + 2)
    used = [core.node_by_id(req.kvc_match_end).last_access_time for req in (other, server.hit)]
    assert used[0] < used[1]


def test_new_prompt_does_not_wait_for_the_load(server):
    assert server.ends(server.submit([200_000, 1, 2])) < 5
    assert not server.hit.output_ids
    assert server.turns(MOST_LEFT_OUT) <= 1


def test_first_of_two_loads_ends(server):
    other = server.submit(PREFIXES[1])
    server.turns(4)
    assert len(server.server.tree_cache.loads) == 2
    server.arrivals = 1
    assert server.ends(server.hit) < 5
    server.turns(10)
    assert not other.output_ids
    server.arrivals = 1
    assert server.ends(other) < 5


def test_prompt_that_waits_for_the_load_of_an_aborted_one(server):
    other = server.submit(PREFIXES[0])
    server.turns(4)
    server.server.abort(server.hit.rid)
    server.turns(4)
    server.arrivals = 1
    assert server.ends(other) < 5
    assert other.cached_tokens == 3 * P and server.runtime.host_tier.loaded_blocks == 3


def test_flush_ends_all_waits(server):
    waits, tree = server.hit.kvc_waits_for, server.server.tree_cache
    assert waits == tree.transfers_ended
    tree.reset()
    assert waits != tree.transfers_ended and not tree.transferring


class Grammars:
    def has_waiting_grammars(self):
        return True


BLOCKING = [
    ("enable_priority_preemption", True), ("prefill_delayer", object()), ("grammar_manager", Grammars()),
    ("chunked_req", object()), ("waiting_queue", []),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BLOCKING, ids=[name for name, _ in BLOCKING])
def test_passes_with_other_effects_are_made(server, name, value):
    scheduler = server.server
    assert all_wait_for_blocks(server.runtime, scheduler)
    setattr(scheduler, name, value)
    assert not all_wait_for_blocks(server.runtime, scheduler)


def test_pass_is_made_for_a_prompt_that_does_not_wait(server):
    for waits in (None, server.hit.kvc_waits_for - 1):
        server.hit.kvc_waits_for = waits
        assert not all_wait_for_blocks(server.runtime, server.server)


def test_every_transfer_counts():
    for loads, fetches, lookups in itertools.product([[], [1]], repeat=3):
        tree = SimpleNamespace(loads=loads, fetches=fetches, lookups=lookups)
        assert DiskCache.transferring.fget(tree) == any((loads, fetches, lookups))
