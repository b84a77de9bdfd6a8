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
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_kvc.adapter import tree_reuse
from sglang_kvc.adapter.request_entry import request_priority
from sglang_kvc.cache import reuse
from sglang_kvc.cache.reuse import FIRST_PAUSE, GAIN, MOST_USES, Sessions, Use
from sglang_kvc.options.request_hints import Hints

from .model import P, ToyServer


@pytest.fixture(scope="module", autouse=True)
def clock_in_every_pass():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reuse, "CLOCK_CALLS", 1)
        yield


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
    params = (None, {}, {"kvc_done": None}, {"kvc_done": False}, {"kvc_done": True}, 3)
    assert [Hints.parse(x).done for x in params] == [False, False, False, False, True, False]
    with pytest.raises(ValueError, match=r'^custom_params\["kvc_done"\] is \'soon\', which is neither true nor false'):
        Hints.parse({"kvc_done": "soon"})


@given(
    st.lists(
        st.tuples(
            st.integers(1, 10**5), st.integers(0, 10**5), st.integers(0, 9), st.sampled_from([-math.inf, -2, 0, 2]),
            st.sampled_from(["finished", "paused", "waiting"])
        ),
        min_size=2, max_size=8,
    ),
    st.integers(0, 10**5),
)  # fmt: skip
def test_rank_is_class_then_priority_then_rate(sessions, later):
    now = max(ended for _, ended, *_ in sessions) + later + 1
    uses = []
    for place, (pause, ended, steps, priority, kind) in enumerate(sessions):
        use = Use(math.log(pause), ended=ended, busy=False, steps=steps, priority=priority, done=kind == "finished")
        use.place = place if kind == "waiting" else None
        uses.append(use)
    by_rank = sorted(range(len(uses)), key=lambda i: uses[i].rank())
    for a, b in itertools.pairwise(by_rank):
        (pause_a, ended_a, steps_a, priority_a, kind_a), (pause_b, ended_b, steps_b, priority_b, kind_b) = (
            sessions[a], sessions[b]
        )  # fmt: skip
        if kind_a != kind_b:
            assert "finished paused waiting".index(kind_a) < "finished paused waiting".index(kind_b)
        elif priority_a != priority_b:
            assert priority_a < priority_b
        elif kind_a == "waiting":
            assert a > b
        elif kind_a == "finished":
            assert ended_a <= ended_b
        else:
            rates = [1 / (p * k + now - e) for p, k, e in ((pause_a, steps_a, ended_a), (pause_b, steps_b, ended_b))]
            assert rates[0] <= rates[1] * (1 + 1e-9)


def test_pause_is_learned_per_step():
    sessions = Sessions(P)
    plain, hinted = (sessions.arrive(None, 300, 0, 0) for _ in range(2))
    for use, steps, pause in ((plain, None, 50), (hinted, 4, 200)):
        sessions.end(use, 10, False, steps=steps)
        assert sessions.arrive(use, 310, 300, 10 + pause) is use
    assert plain.log_pause == pytest.approx(hinted.log_pause)
    sessions.end(hinted, 300, False)
    assert hinted.steps == 1  # the hint holds for one pause


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["end", "arrive", "read"]), st.integers(0, 3), st.sampled_from([None, 0, 1.5, 4]),
            st.integers(0, 3)
        ),
        max_size=40,
    )
)  # fmt: skip
def test_sessions_expire_after_their_time_to_live(events):
    """A session is finished by the first reading of the clock that is its time to live after the first one since its
    end."""
    sessions, clock = Sessions(P), 0.0
    uses = [sessions.arrive(None, 300, 0, 0) for _ in range(4)]
    running, lives, first = {0, 1, 2, 3}, {}, {}
    for now, (event, i, ttl, passed) in enumerate(events):
        clock += passed
        if event == "end" and i in running:
            running.remove(i)
            sessions.end(uses[i], now, False, ttl)
            if ttl is not None:
                lives[i] = ttl
        elif event == "arrive" and i not in running:
            running.add(i)
            assert sessions.arrive(uses[i], 300, 300, now) is uses[i] and not uses[i].done
            lives.pop(i, None), first.pop(i, None)
        elif event == "read":
            expired = sessions.expire(lambda: clock)  # noqa: B023
            for k in lives:
                first.setdefault(k, clock)
            due = {k for k in lives if clock >= first[k] + lives[k]}
            assert {uses.index(use) for use in expired} == due
            assert all(uses[k].done for k in due)
            for k in due:
                del lives[k], first[k]
    assert not any(uses[k].done for k in running)


@pytest.mark.parametrize("read", [False, True], ids=["before its time begins", "afterwards"])
def test_aborted_prompt_keeps_the_time_to_live_and_the_pause(monkeypatch, read):
    monkeypatch.setattr(reuse, "CLOCK_CALLS", 1)
    sessions = Sessions(P)
    use = sessions.arrive(None, 300, 0, 0)
    use.priority = 3.0
    sessions.end(use, 1, False, 5.0)
    if read:
        assert not sessions.expire(lambda: 0.0)
    pause = use.log_pause
    assert sessions.arrive(use, 400, 300, 1000) is use and use.log_pause != pause
    use.priority = 0.0
    sessions.abandon(use)
    assert (use.log_pause, use.priority, use.prompt) == (pause, 3.0, 300)
    if not read:
        assert not sessions.expire(lambda: 0.0)
    assert sessions.expire(lambda: 6.0) == [use] and use.done


def test_clock_is_read_only_for_times_to_live():
    sessions = Sessions(P)
    use = sessions.arrive(None, 300, 0, 0)
    sessions.end(use, 1, True, 5.0)  # finished already
    assert sessions.expire(None) == []


def test_clock_is_read_in_some_passes_only(monkeypatch):
    """It is a collective operation of all ranks."""
    monkeypatch.setattr(reuse, "CLOCK_CALLS", 8)
    sessions, readings = Sessions(P), []
    sessions.end(sessions.arrive(None, 300, 0, 0), 1, False, 60)
    for _ in range(80):
        assert not sessions.expire(lambda: readings.append(1) or 0.0)
    assert len(readings) == 10


def test_times_to_live_of_abandoned_sessions_are_bounded(monkeypatch):
    monkeypatch.setattr(reuse, "MOST_DEADLINES", 3)
    sessions, uses = Sessions(P), []
    for i in range(5):
        uses.append(sessions.arrive(None, 300, 0, 0))
        sessions.end(uses[i], i, False, 60)
        sessions.expire(lambda: 0.0)
    assert [*sessions.deadlines] == uses[2:]


@pytest.mark.parametrize("low_first", [False, True])
def test_priority_follows_order_of_admission(low_first):
    """SGLang's own sort is the reference."""
    queue = [SimpleNamespace(priority=p, time_stats=SimpleNamespace(wait_queue_entry_time=0)) for p in (3, -1, 0, 7)]
    scheduler = SimpleNamespace(enable_priority_scheduling=True, schedule_low_priority_values_first=low_first)
    by_rank = sorted(queue, key=lambda req: request_priority(scheduler, req), reverse=True)
    SchedulePolicy._sort_by_priority_and_fcfs(queue, 1 if low_first else -1)
    assert by_rank == queue
    assert request_priority(scheduler, SimpleNamespace(priority=None)) < request_priority(scheduler, queue[-1])
    scheduler.enable_priority_scheduling = False
    assert {request_priority(scheduler, req) for req in (*queue, SimpleNamespace(priority=None))} == {0}


# ---- in the tree


class Queue:
    """A toy server and the requests that wait for it."""

    def __init__(self, **options):
        self.server = ToyServer(**{"high": "bf16", "blocks": 8, "eviction": "reuse", **options})
        self.waiting: list = []

    @property
    def reuse(self):
        return self.server.tree.reuse

    def arrive(self, tokens: list[int], last: bool = False, priority: float = 0.0, **hints):
        req = SimpleNamespace(
            origin_input_ids=array("q", tokens), output_ids=array("q"), extra_key=None, cache_salt=None,
            kvc_hints=Hints(last, **hints), kv=SimpleNamespace(holds_kv=False)
        )  # fmt: skip
        self.reuse.arrive(req, priority)
        self.waiting.append(req)
        self.reuse.wait(self.waiting)
        return req

    def leave(self, req, admitted: bool = False) -> None:
        """`req` leaves the queue, because it is admitted or aborted."""
        req.kv.holds_kv = admitted
        self.waiting.remove(req)
        self.reuse.wait(self.waiting)

    def turn(self, tokens: list[int], last: bool = False, priority: float = 0.0, **hints) -> None:
        """A request from its arrival to its end."""
        req = self.arrive(tokens, last, priority, **hints)
        self.leave(req, admitted=True)
        run = self.server.admit(tokens, use=req)
        self.server.finish(run)

    def evicted(self, blocks: int = 1) -> int | None:
        """The prompt, of this number of blocks, that the next eviction takes."""
        before, tokens = self.cached(), blocks * P
        with self.server.runtime.capacity.exact_need(self.server.allocator.available_size() + tokens):
            self.server.tree.evict(EvictParams(num_tokens=tokens))
        (victim,) = before - self.cached()
        return victim

    def demoted(self) -> int:
        """The prompt, of one block, that the next demotion moves one step."""
        component, nodes = self.server.tree.component, self.server.tree.root_node.children.values()
        prompts = {int(component.blocks_of(n)[0]): n.key.token_ids[0] // 1000 for n in nodes}
        before = self.server.runtime.blocks.format_id.copy()
        self.server.shrink(1)
        (block,) = np.flatnonzero(self.server.runtime.blocks.format_id != before)
        return prompts[block]

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


@pytest.mark.parametrize("retried", [False, True])
def test_aborted_prompt_leaves_its_session_as_it_was(retried):
    """The client may try again, and its hint then holds for all blocks of the session."""
    queue = Queue()
    queue.turn(prompt(0))
    queue.turn(prompt(1), last=not retried)
    longer = [*prompt(1)[:P], *range(1900, 1900 + P), 1]
    session = queue.reuse.sessions
    aborted = queue.arrive(longer)
    assert aborted.kvc_use.busy
    queue.leave(aborted)
    assert not aborted.kvc_use.busy and not session.waiting
    if retried:
        queue.turn(longer, last=True)
    assert queue.evicted(blocks=1 + retried) == 1


@pytest.mark.parametrize("leaves", [False, True])
def test_blocks_of_finished_sessions_are_demoted_first_and_of_waiting_prompts_last(leaves):
    """From k8v4 to k4v4 and on to k2v2. The rank of a prompt that leaves the queue falls."""
    queue = Queue(high="k8v4", floor="k2v2", page_bytes=1280, window=0, blocks=12)
    for i in range(5):
        queue.turn(prompt(i), last=i == 2)
    waits = [queue.arrive(prompt(i)) for i in (0, 4)]
    assert [queue.demoted() for _ in range(3)] == [2, 2, 1]
    if leaves:
        queue.leave(waits[0])
        assert [queue.demoted() for _ in range(7)] == [0, 3, 0, 1, 3, 4, 4]  # session 0 has paused longest again
    else:
        assert [queue.demoted() for _ in range(7)] == [3, 1, 3, 4, 0, 4, 0]


def test_block_of_paused_session_is_demoted_by_cost_and_chance_of_return():
    """A page of the second step costs 70.6 times as much as one of the first."""
    for silence, first in ((69_000, 1), (71_000, 0)):
        queue = Queue(high="k8v4", floor="k2v2", page_bytes=1280, window=0, blocks=12)
        queue.turn(prompt(0))
        assert queue.demoted() == 0
        queue.server.runtime.step += silence
        queue.turn(prompt(1))
        assert queue.demoted() == first


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
    assert [use.done for use in (node.kvc_uses[-1], *new.kvc_uses, *old.kvc_uses)] == [False, False, True]
    assert node.kvc_uses[-1] is new.kvc_uses[0]


def test_expired_session_is_evicted_first(monkeypatch):
    """Its rank falls, and the queue of leaves must be updated."""
    clock = SimpleNamespace(monotonic=lambda: 100.0)
    monkeypatch.setattr(tree_reuse, "time", clock)
    queue = Queue()
    for i in range(5):
        queue.turn(prompt(i), ttl={3: 50.0, 4: 5.0}.get(i))
    queue.reuse.wait([])
    assert queue.evicted() == 0
    clock.monotonic = lambda: 104.9
    queue.reuse.wait([])
    assert queue.evicted() == 1
    queue.turn(prompt(3))  # without a time to live
    clock.monotonic = lambda: 105.0
    queue.turn(prompt(5))
    clock.monotonic = lambda: 500.0
    queue.turn(prompt(6))
    assert [queue.evicted() for _ in range(5)] == [4, 2, 5, 6, 3]


def test_ranks_expire_sessions_in_same_pass(monkeypatch):
    """Their clocks differ, and so do the times at which they read them."""
    clocks, passes = ([70.0, 75.1, 80.0], [9000.0, 9004.0, 9005.0]), []
    for own in clocks:
        queue, agreed, sent = Queue(), iter([70_000, 75_100, 80_000]), []
        monkeypatch.setattr(tree_reuse, "time", SimpleNamespace(monotonic=iter(own).__next__))
        monkeypatch.setattr(queue.server.tree, "_agreed", lambda n, to=agreed, sent=sent: sent.append(n) or next(to))
        queue.turn(prompt(0))
        queue.turn(prompt(1), ttl=5.0)
        (use,) = queue.reuse.sessions.lives
        passes.append([queue.reuse.wait([]) or use.done for _ in range(3)])
        assert sent == [1000 * x for x in own[: len(sent)]] and queue.evicted() == 1
    assert passes == [[False, True, True]] * 2


def test_fewer_steps_are_kept_longer():
    queue = Queue()
    for i, steps in enumerate((0, 3, None, 1)):
        queue.turn(prompt(i), steps=steps)
    assert [queue.evicted() for _ in range(4)] == [1, 2, 3, 0]


def test_lower_priority_is_evicted_first_within_its_class():
    queue = Queue()
    for i, (priority, last) in enumerate(((1, False), (0, False), (5, True), (-1, True), (0, False))):
        queue.turn(prompt(i), last, priority)
    queue.arrive(prompt(4), priority=-7)
    assert [queue.evicted() for _ in range(5)] == [3, 2, 1, 0, 4]


def test_shared_prefix_is_kept_for_session_that_waits():
    """Another session used the prefix later and is finished. The waiting session has no other blocks left."""
    queue, shared = Queue(), [*range(P)]
    queue.turn(prompt(1))
    queue.turn([*shared, *range(500, 500 + P), 1], last=True)
    waits = queue.arrive([*shared, *range(600, 600 + P), 1])
    queue.turn([*shared, *range(700, 700 + P), 1], last=True)
    (node,) = (n for n in queue.server.tree.root_node.children.values() if n.key.token_ids[0] == 0)
    while node.children:  # the blocks of the finished sessions go first
        with queue.server.runtime.capacity.exact_need(queue.server.allocator.available_size() + P):
            queue.server.tree.evict(EvictParams(num_tokens=P))
    assert [queue.evicted() for _ in range(2)] == [1, 0]
    assert waits.kvc_use.place is not None


def test_nodes_remember_few_sessions():
    queue = Queue()
    for i in range(3 * MOST_USES):
        queue.turn([*range(P), 900 + i], steps=i)
    for node in queue.server.tree.root_node.children.values():
        assert 0 < len(node.kvc_uses) <= MOST_USES
