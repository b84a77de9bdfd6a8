"""The simulator's cache that demotes: its accounting, its order, and the bytes of its formats."""

import gzip
import json
import random
import sys
from dataclasses import replace

import pytest

from bench import common
from bench.agents import ladder
from bench.agents.cache import BLOCK, Chain
from bench.agents.demotion import DemotingCache
from bench.agents.orders import ORDERS, QUEUES
from bench.agents.simulate import Simulation

from .test_simulated_agents import SMALL, sessions

HIGH, LOW = 10, 3


def forgetful(sessions):
    """The sessions, in which every fourth prompt drops the second half of the one before."""
    return [
        replace(s, steps=tuple(replace(x, shared=x.shared // (2 if i % 4 == 3 else 1)) for i, x in enumerate(s.steps)))
        for s in sessions
    ]


class Audited(DemotingCache):
    """Cache whose bytes are recounted after each request for room."""

    demotions = evictions = refusals = 0

    def make_room(self, blocks, now):
        before = {c: (c.device, sum(c.lowered)) for c in self.chains}
        made = super().make_room(blocks, now)
        demoted = sum(sum(c.lowered) for c in self.chains)
        assert all(len(c.lowered) == c.device for c in self.chains) and self.demoted == demoted
        spare = self.capacity * HIGH - (self.device * HIGH - demoted * (HIGH - LOW)) - blocks * HIGH
        after = {c: (c.device, sum(c.lowered)) for c in before}
        if not made:
            assert before == after and spare < 0
            self.refusals += 1
        elif any(after[c][0] < before[c][0] for c in before):
            assert all(all(c.lowered) for c in self.chains if not c.locks), "evicted before all others were demoted"
            assert 0 <= spare < LOW
            self.evictions += 1
        elif before != after:
            assert 0 <= spare < HIGH - LOW, "demoted more than needed"
            self.demotions += 1
        return made


@pytest.mark.parametrize("order", ["lru", "told", "clairvoyant"])
def test_blocks_are_demoted_before_any_is_evicted(order):
    cache, slow = Audited(150, 0, ORDERS[order], high=HIGH, low=LOW), replace(SMALL, token_time=0.2)
    totals = Simulation(forgetful(sessions(40)), slow, ORDERS[order], QUEUES["fcfs"], 24, cache=cache).run(0, 2000)
    assert cache.demotions > 20 and cache.evictions > 20 and cache.refusals
    assert 0 < totals.demoted < totals.device < totals.prompt


@pytest.mark.parametrize("seed", range(8))
def test_order_of_demotion_is_that_of_a_scan_over_all_blocks(seed):
    draw, now = random.Random(seed), 100.0
    chains = [Chain(used=used) for used in draw.sample(range(100), 9)]
    for chain in chains:
        chain.waits_since = draw.choice([None, None, float(draw.randint(0, 99))])
        chain.locks = draw.random() < 0.2
        chain.device = chain.stored = draw.randint(1, 5)
        chain.lowered = bytearray(draw.choices([0, 1], k=chain.device))
    blocks = sum(c.device for c in chains)
    lowered = sum(sum(c.lowered) for c in chains)
    cache = DemotingCache(blocks, 0, ORDERS["lru"], dict.fromkeys(chains), blocks, high=HIGH, low=LOW, demoted=lowered)
    for _ in range(4):
        want = {c: bytearray(c.lowered) for c in chains}
        free = sum(sum(w) for w in want.values()) * (HIGH - LOW)
        need = free // HIGH + 1
        while free < need * HIGH:
            movable = [(c, at) for c in chains if not c.locks for at in range(c.device) if not want[c][at]]
            if not movable:
                return
            waits = [(c.waits_since is not None, -(c.waits_since or 0), c.used, -at) for c, at in movable]
            chain, at = movable[waits.index(min(waits))]
            want[chain][at] = 1
            free += HIGH - LOW
        assert cache.make_room(need, now)
        assert {c: c.lowered for c in chains} == want


def test_smaller_formats_find_more_of_the_prompts():
    again = []
    for low in (9, 5, 1):
        cache = DemotingCache(400, 0, ORDERS["lru"], high=HIGH, low=low)
        totals = Simulation(sessions(40), SMALL, ORDERS["lru"], QUEUES["fcfs"], 24, cache=cache).run(0, 1000)
        again.append(totals.again / totals.prompt)
    assert again[0] > again[1] > again[2] == 0


def test_formats_have_the_bytes_of_pages():
    """A head of a block has codes and scales of 128 tokens, 512 bytes of key scales, and less than 1 % of tables."""
    curves, bf16, heads = ladder.curves(), 4 * 8 * 128 * 32, 32 * 8
    k4v4, k2v2 = (heads * (128 * (2 * 128 * bits // 8 + 4 * groups) + 512) for bits, groups in ((4, 1), (2, 4)))
    assert curves["k4v4"].cache().capacity == pytest.approx(55e9 / k4v4, rel=0.01)
    assert curves["7x"].cache().low == pytest.approx(128 * bf16 / 7, abs=1)
    assert curves["pages"].cache().low == pytest.approx(k2v2, rel=0.01)
    cache = curves["floor"].cache()
    assert cache.high == pytest.approx(k4v4, rel=0.01)
    assert cache.low == 128 * 26528 + 5  # with slack, because a page holds 32 tokens of k4v4


def test_command_writes_every_curve(tmp_path, monkeypatch):
    steps = [[BLOCK * (4 + k), BLOCK * (3 + k) if k else 0, 5, 3, 1.0] for k in range(6)]
    file = tmp_path / "traces.json.gz"
    with gzip.open(file, "wt") as out:
        json.dump({"sessions": [{"id": str(i), "tools": BLOCK, "steps": steps} for i in range(8)]}, out)
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    small = {name: replace(curve, memory=60e6) for name, curve in ladder.curves().items()}
    monkeypatch.setattr(ladder, "curves", lambda: small)
    argv = ["ladder", str(file), "--agents", "3", "--seeds", "1", "--hours", "0.1", "--queues", "fcfs"]
    monkeypatch.setattr(sys, "argv", argv)
    ladder.main()
    numbers = json.loads((tmp_path / "agents" / "ladder.json").read_text())["numbers"]
    rows = {name: numbers[f"{name}.fcfs.a3"] for name in ladder.curves()}
    assert rows["floor"]["from_demoted"] > 0 == rows["k4v4"]["from_demoted"]
    assert rows["12x"]["from_cache"] > rows["7x"]["from_cache"] > rows["k4v4"]["from_cache"]
    assert numbers["formats"]["7x"]["low_ratio"] == 7 and 0 < numbers["settings"]["endless"] < 1
