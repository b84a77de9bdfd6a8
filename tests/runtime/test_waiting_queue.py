"""Scheduling passes while all waiting prompts wait for their stored blocks."""

from __future__ import annotations

import pytest
from sglang.srt.managers.schedule_policy import SchedulePolicy

from sglang_kvc.adapter import waiting_queue

from .model import P, make_runtime
from .overlap import Overlap, configured
from .test_prefetch import STORED, server_with_stored_prompt, turns_until


class Server:
    """A request decodes and a stored prompt waits for its load, which does not end before `arrives` is set."""

    def __init__(self, monkeypatch):
        self.runtime = runtime = make_runtime(blocks=40, high="k4v4", window=0, host_memory=2_000_000)
        self.configured = configured(runtime, 4 * P, retract_every=10**6)
        self.configured.__enter__()
        self.server: Overlap = server_with_stored_prompt(runtime, chunk=4 * P)
        arrived, self.arrives, self.passes = runtime.host_tier.arrived, False, 0
        monkeypatch.setattr(runtime.host_tier, "arrived", lambda: arrived() if self.arrives else 0)
        calc_priority = SchedulePolicy.calc_priority

        def counted(*args, **kwargs):
            self.passes += 1
            return calc_priority(*args, **kwargs)

        monkeypatch.setattr(SchedulePolicy, "calc_priority", counted)
        self.server.submit([100_000 + i for i in range(5)], [6000 + i for i in range(100)], None, None)
        self.turns(4)
        self.server.submit(STORED, [5001], None, None)
        self.hit = self.last
        self.turns(4)  # the first pass begins the load
        assert self.server.tree_cache.loads

    @property
    def last(self):
        return list(self.server.requests.values())[-1]

    def turns(self, n: int) -> int:
        """Run `n` turns; return the number of passes over the queue."""
        before = self.passes
        for _ in range(n):
            self.server.turn()
        return self.passes - before

    def ends(self, req) -> None:
        turns_until(self.server, req.finished)


@pytest.fixture
def server(monkeypatch):
    made = Server(monkeypatch)
    yield made
    made.configured.__exit__(None, None, None)


def test_no_pass_until_the_load_ends(server):
    assert server.turns(20) == 0 and not server.hit.output_ids
    server.arrives = True
    server.ends(server.hit)
    assert server.hit.cached_tokens == 3 * P


def test_new_prompt_does_not_wait_for_the_load(server):
    server.server.submit([200_000 + i for i in range(5)], [7000], None, None)
    server.ends(server.last)
    assert not server.hit.output_ids
    assert server.turns(20) == 0
    server.arrives = True
    server.ends(server.hit)


def test_prompt_of_the_same_prefix_waits_for_the_same_load(server):
    server.server.submit(STORED, [5002], None, None)
    assert server.turns(20) == 1
    server.arrives = True
    server.ends(server.last)
    assert server.hit.finished() and server.last.cached_tokens == 3 * P
    assert server.runtime.host_tier.loaded_blocks == 3


def test_aborted_prompt_leaves_the_queue(server):
    server.server.abort(server.hit.rid)
    server.server.submit([200_000 + i for i in range(5)], [7000], None, None)
    server.ends(server.last)


@pytest.mark.parametrize("name", ["enable_priority_preemption", "prefill_delayer", "grammar_manager"])
def test_passes_with_other_effects_are_not_left_out(server, name):
    class Grammars:
        def has_waiting_grammars(self):
            return True

    scheduler = server.server
    assert waiting_queue.all_wait_for_blocks(server.runtime, scheduler)
    setattr(scheduler, name, Grammars())
    assert not waiting_queue.all_wait_for_blocks(server.runtime, scheduler)


def test_prompts_are_looked_at_when_nothing_is_under_way(server):
    """A flush forgets loads, so that none will end."""
    server.server.tree_cache.loads.clear()
    assert not waiting_queue.all_wait_for_blocks(server.runtime, server.server)
