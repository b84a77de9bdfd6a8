"""The simulator of agents: the accounting of its cache, and its eviction and admission orders."""

import gzip
import heapq
import json
import random
from collections import Counter
from dataclasses import replace

import pytest

from bench.agents import simulate, traces
from bench.agents.cache import BLOCK, Cache, Chain
from bench.agents.orders import ORDERS, QUEUES
from bench.agents.simulate import Machine, Simulation
from bench.agents.traces import Session, Step

SMALL = Machine(memory=400.0, token_bytes=1 / BLOCK, prefill_rate=1280.0, copy_rate=1e9)  # 400 blocks of one byte each


def sessions(n=12, seed=0):
    """Prompts that grow by one to six blocks per step, after two blocks of tools that half of them share."""
    draw, out = random.Random(seed), []
    for i in range(n):
        steps, length = [], 20 * BLOCK
        for k in range(draw.randint(3, 9)):
            shared, length = (length if k else 0), length + draw.randint(1, 6) * BLOCK
            steps.append(Step(length, shared, draw.randint(1, 300), draw.choice([1.0, 4.0, 40.0])))
        out.append(Session(str(i), (2 + i % 2) * BLOCK, tuple(steps)))
    return out


@pytest.mark.parametrize("host", [0.0, 150.0])
@pytest.mark.parametrize("order", ORDERS)
def test_blocks_are_counted_once(order, host, monkeypatch):
    simulation = Simulation(sessions(), replace(SMALL, host_memory=host), ORDERS[order], QUEUES["fcfs"], agents=10)
    answers, decode, finish, ends = Counter(), simulation.decode, simulation.finish, []

    def decoded(now, turn, answer):
        answers[turn] = answer
        decode(now, turn, answer)

    def finished(now, turn, answer):
        del answers[turn]
        finish(now, turn, answer)
        if simulation.computing:
            return  # the answer to the current prompt is not known here
        cache = simulation.cache
        assert cache.device == sum(c.device for c in cache.chains) + answers.total() <= cache.capacity
        assert cache.host == sum(c.stored - c.device for c in cache.chains) <= cache.host_capacity
        ends.append(now)

    monkeypatch.setattr(simulation, "decode", decoded)
    monkeypatch.setattr(simulation, "finish", finished)
    simulation.run(0, 2000)
    assert len(ends) > 50


def test_unbounded_cache_hits_every_earlier_token():
    all_sessions = sessions()
    endless = replace(SMALL, memory=1e6)
    totals = Simulation(all_sessions, endless, ORDERS["lru"], QUEUES["fcfs"], agents=4).run(0, 3000)
    assert totals.again == 0 and totals.device > 0 and totals.host == 0
    # Hits are whole blocks, including tools that other sessions brought in.
    assert totals.device / totals.prompt >= traces.endless_share(all_sessions) - 0.02
    assert max(totals.first_token) < 10


def test_host_memory_restores_blocks_evicted_from_device():
    all_sessions = sessions()
    plain, hosted = (
        Simulation(all_sessions, replace(SMALL, host_memory=h), ORDERS["lru"], QUEUES["fcfs"], 14).run(0, 3000)
        for h in (0.0, 1e5)
    )
    assert plain.again > 0 and plain.host == 0
    assert hosted.host > 0 and hosted.again == 0


def chains(**fields):
    n = len(next(iter(fields.values())))
    return [Chain(device=1, stored=1, **{k: v[i] for k, v in fields.items()}) for i in range(n)]


@pytest.mark.parametrize(
    ("order", "fields", "first"),
    [
        ("oldest", {"used": [3.0, 1.0, 2.0]}, 1),
        ("mru", {"used": [3.0, 1.0, 2.0]}, 0),
        ("lfu", {"used": [3.0, 1.0, 2.0], "hits": [1, 3, 2]}, 0),
        ("slru", {"used": [3.0, 1.0, 2.0], "hits": [5, 5, 1]}, 2),
        ("lru", {"used": [3.0, 1.0, 2.0], "waits_since": [None, 9.0, None]}, 2),
        ("lru", {"used": [3.0, 1.0, 2.0], "waits_since": [7.0, 9.0, 8.0]}, 1),
        ("clairvoyant", {"next_arrival": [5.0, 9.0, 7.0]}, 1),
        ("reuse", {"ended": [30.0, 20.0, 25.0], "pause": [15.0, 1.0, 1.0]}, 0),  # short silence, long pause
        ("reuse", {"ended": [30.0, 20.0, 25.0], "pause": [1.0, 1.0, 1.0]}, 1),
        ("reuse", {"ended": [30.0, 20.0, 25.0], "dead": [True, False, False]}, 1),  # the end is unknown
        ("told", {"ended": [30.0, 20.0, 25.0], "dead": [True, False, False]}, 0),
        ("planned", {"ended": [30.0, 20.0, 25.0], "pause": [1.0, 1.0, 1.0], "steps": [12, 1, 0]}, 0),
        ("ttl-60", {"ended": [30.0, 20.0, 25.0], "pause": [1.0, 1.0, 1.0], "used": [39.9, 40.0, 90.0]}, 0),
        ("ttl-60", {"ended": [30.0, 20.0], "used": [9.0, 50.0], "waits_since": [95.0, None]}, 1),
    ],
)
def test_order_evicts_expected_chain_first(order, fields, first):
    candidates = chains(**fields)
    cache = Cache(len(candidates), 0, ORDERS[order])
    cache.chains, cache.device = dict.fromkeys(candidates), len(candidates)
    assert cache.make_room(1, now=100.0)
    assert [c.device for c in candidates] == [int(i != first) for i in range(len(candidates))]


def test_parent_is_evicted_after_its_child():
    cache, parent = Cache(4, 0, ORDERS["oldest"]), Chain(device=2, stored=2, used=0.0)
    child = Chain(parent, 2, 2, used=5.0)
    cache.chains, cache.device = dict.fromkeys((parent, child)), 4
    assert cache.make_room(3, now=9.0) and (parent.device, child.device) == (1, 0)
    cache.lock(child)
    assert not cache.make_room(4, now=9.0) and parent.device == 1


class Waits:
    def __init__(self, uncached, before=0, overtaken=0):
        self.left, self.computed_before, self.overtaken = uncached, before, overtaken

    def uncached(self):
        return self.left

    def cached(self):
        return 1000 - self.left


@pytest.mark.parametrize(
    ("queue", "waiting", "first"),
    [
        ("fcfs", [Waits(900), Waits(10)], 0),
        ("lpm", [Waits(900), Waits(10)], 1),
        ("hrrn", [Waits(900), Waits(10, before=490)], 1),
        ("hrrn", [Waits(900), Waits(10, before=499)], 0),
        ("shortest-256", [Waits(900, overtaken=255), Waits(10)], 1),
        ("shortest-256", [Waits(900, overtaken=256), Waits(10)], 0),
    ],
)
def test_queue_admits_expected_request_first(queue, waiting, first):
    assert QUEUES[queue](waiting, 500) is waiting[first]


def test_planned_sessions_name_steps_until_their_next_prompt():
    """Pauses are 1, 4 or 40 s."""
    simulation, steps = Simulation(sessions(), SMALL, ORDERS["planned"], QUEUES["fcfs"], 12), set()
    for _ in range(200):
        when, _, what, args = heapq.heappop(simulation.events)
        simulation.count_forwards(when)
        what(when, *args)
        steps |= {c.steps for c in simulation.cache.chains}
    assert steps == {0, 1, 4}


def test_same_seed_gives_same_run():
    runs = [Simulation(sessions(), SMALL, ORDERS["reuse"], QUEUES["hrrn"], 12, seed=4).run(100, 500) for _ in range(2)]
    assert runs[0] == runs[1] and runs[0].prompt > 0


def test_traces_are_split_and_bounded(tmp_path):
    step = lambda prompt, shared, think: [prompt, shared, 5, think, 1.0]  # noqa: E731
    recorded = [
        {"id": f"s{i}", "tools": 300, "system": 9, "steps": [step(500 + i, 0, 7), step(900, 448, 9000)]}
        for i in range(6)
    ]
    recorded.append({"id": "long", "tools": 1, "system": 1, "steps": [step(500, 0, 0), step(10**6, 500, 0)]})
    file = tmp_path / "traces.json.gz"
    with gzip.open(file, "wt") as out:
        json.dump({"meta": {}, "sessions": recorded}, out)
    halves = [traces.load(file, longest=10_000, pause=60.0, split=split) for split in traces.SPLITS]
    names = [{s.name for s in half} for half in halves]
    assert len(names[0]) == len(names[1]) == 3 and not names[0] & names[1] and "long" not in names[0] | names[1]
    assert all(s.steps[1] == Step(900, 448, 5, 60.0) and s.tools == 300 for half in halves for s in half)
    argv = [str(file), "--agents", "2", "--orders", "lru", "--seeds", "1", "--hours", "0.1", "--host", "1e6"]
    assert {h for _, _, _, h in simulate.settings(simulate.arguments(argv))} == {0.0, 1e6}
