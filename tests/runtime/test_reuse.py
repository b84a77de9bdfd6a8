"""`--kvc-eviction reuse`: which blocks are evicted first, and how a session is recognized."""

from __future__ import annotations

import itertools
import math
from array import array
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_kvc.cache.reuse import FIRST_PAUSE, GAIN, Sessions, Use
from sglang_kvc.options.request_hints import is_last

from .model import P, ToyServer


def silent(pause: int, ended: int) -> Use:
    return Use(math.log(pause), ended=ended, busy=False)


@given(
    st.lists(st.tuples(st.integers(1, 10**5), st.integers(0, 10**5)), min_size=2, max_size=8),
    st.integers(0, 10**5),
)
def test_silent_sessions_are_ranked_by_return_rate(sessions, later):
    """The rate is that of a gamma-distributed exponential after a silence, whenever it is evaluated."""
    now = max(ended for _, ended in sessions) + later
    rates = [1 / (pause + now - ended) for pause, ended in sessions]
    ranks = [silent(pause, ended).rank() for pause, ended in sessions]
    by_rank = sorted(range(len(ranks)), key=ranks.__getitem__)
    assert all(rates[a] <= rates[b] * (1 + 1e-9) for a, b in itertools.pairwise(by_rank))


def test_waiting_sessions_rank_last_and_ended_ones_first():
    sessions = Sessions(P)
    waits = [sessions.arrive(None, 10, 0, 5) for _ in range(3)]
    assert sessions.wait(waits) == []
    idle, over = silent(10, 10**6), silent(10, 10**6)
    sessions.end(over, 10**6, True)
    assert sorted([*waits, idle, over], key=Use.rank) == [over, idle, *reversed(waits)]
    assert sessions.wait(waits[1:]) == [waits[0]]
    assert sorted([*waits, idle, over], key=Use.rank) == [over, waits[0], idle, waits[2], waits[1]]


def test_typical_pause_is_learned():
    sessions, use, now, pauses = Sessions(P), None, 0, [40, 40, 7, 3000, 40]
    for length, pause in enumerate([0, *pauses]):
        now += pause
        use = sessions.arrive(use, 300 + length, 300, now)
        now += 5
        sessions.end(use, now, False)
    typical = math.log(FIRST_PAUSE)
    for x in np.log(pauses):
        typical = (1 - GAIN) * typical + GAIN * x
    assert use.log_pause == pytest.approx(typical)
    # New sessions start from the pause learned over all sessions, which is shorter here.
    assert math.log(FIRST_PAUSE) > sessions.arrive(None, 1, 0, now).log_pause > typical


@pytest.mark.parametrize(
    ("cached", "busy", "same"),
    [(4 * P, False, True), (3 * P + 1, False, True), (3 * P, False, False), (4 * P, True, False)],
)
def test_longer_prompt_continues_session(cached, busy, same):
    sessions = Sessions(P)
    before = sessions.arrive(None, 4 * P + 1, 0, 0)
    if not busy:
        sessions.end(before, 10, True)
    now = sessions.arrive(before, 6 * P, cached, 20)
    assert (now is before) == same
    assert now.busy and now.prompt == 6 * P and (not same or not now.done)


def test_hint_must_be_boolean():
    assert [is_last(x) for x in (None, {}, {"kvc_done": None}, {"kvc_done": False}, {"kvc_done": True}, 3)] == [
        False, False, False, False, True, False
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r'^custom_params\["kvc_done"\] is \'soon\', which is neither true nor false'):
        is_last({"kvc_done": "soon"})


# ---- in the tree


class Queue:
    """A toy server and the requests that wait for it."""

    def __init__(self, **options):
        self.server = ToyServer(high="bf16", blocks=8, eviction="reuse", **options)
        self.waiting: list = []

    @property
    def reuse(self):
        return self.server.tree.reuse

    def arrive(self, tokens: list[int], last: bool = False):
        req = SimpleNamespace(
            origin_input_ids=array("q", tokens), output_ids=array("q"), extra_key=None, cache_salt=None, kvc_last=last
        )
        self.reuse.arrive(req)
        self.waiting.append(req)
        self.reuse.wait(self.waiting)
        return req

    def leave(self, req) -> None:
        self.waiting.remove(req)
        self.reuse.wait(self.waiting)

    def turn(self, tokens: list[int], last: bool = False) -> None:
        """A request from its arrival to its end."""
        req = self.arrive(tokens, last)
        self.leave(req)
        run = self.server.admit(tokens, use=req)
        self.server.finish(run)

    def evicted(self) -> int | None:
        """The prompt that the next eviction takes."""
        before = self.cached()
        with self.server.runtime.capacity.exact_need(self.server.allocator.available_size() + P):
            self.server.tree.evict(EvictParams(num_tokens=P))
        (victim,) = before - self.cached()
        return victim

    def cached(self) -> set[int]:
        return {n.key.token_ids[0] // 1000 for n in self.server.tree.root_node.children.values()}


def prompt(i: int) -> list[int]:
    return [*range(1000 * i, 1000 * i + P), 1]


def test_prompt_of_ended_session_is_evicted_first():
    queue = Queue()
    for i in range(3):
        queue.turn(prompt(i), last=i == 2)
    assert [queue.evicted() for _ in range(3)] == [2, 0, 1]


def test_prefixes_of_waiting_prompts_are_evicted_last():
    queue = Queue()
    for i in range(4):
        queue.turn(prompt(i))
    for i in (0, 1):
        queue.arrive(prompt(i))
    assert [queue.evicted() for _ in range(4)] == [2, 3, 1, 0]


def test_prefix_of_aborted_prompt_is_evicted_in_usual_order():
    """Its rank falls, and the queue of leaves must be updated."""
    queue = Queue()
    for i in range(3):
        queue.turn(prompt(i))
    aborted = queue.arrive(prompt(0))
    queue.arrive(prompt(2))
    assert queue.evicted() == 1
    last_in_line = queue.server.tree.tree_core.evictable_device_leaves.next()
    assert last_in_line.key.token_ids[0] == 2000
    queue.leave(aborted)
    assert [queue.evicted() for _ in range(2)] == [0, 2]


def test_slow_session_is_evicted_before_quick_one_silent_longer():
    queue = Queue()
    step = queue.server.runtime
    for i, pause in ((0, 2000), (1, 2)):
        for _ in range(12):
            queue.turn(prompt(i))
            step.step += pause
    step.step -= 2000
    queue.turn(prompt(0))
    assert queue.evicted() == 0


def test_split_leaf_keeps_its_session():
    queue = Queue()
    long = [*range(2 * P), 1]
    queue.turn(long, last=True)
    queue.turn([*range(P), *range(5000, 5000 + P), 1])
    (node,) = queue.server.tree.root_node.children.values()
    old, new = sorted(node.children.values(), key=lambda n: n.key.token_ids[0])
    assert node.kvc_use is new.kvc_use is not old.kvc_use and old.kvc_use.done and not new.kvc_use.done
