"""Simulation of coding agents in a closed loop on one GPU: the share of prompt tokens from the cache, and waiting
times, by eviction order and admission order.

    python -m bench.agents.simulate TRACES.json.gz        # the report half, to bench/results/agents/simulated.json
    ... --split tune --agents 24,48 --orders lru,reuse --queues fcfs,hrrn --no-write

TRACES is described in `bench.agents.traces`. Each agent plays one session after the other and begins somewhere in the
first one. A prompt arrives when the session's recorded pause after its last answer is over. One prompt is prefilled at
a time; decoding takes a fixed time per token and runs in parallel. Blocks of running prompts are locked. Counting
begins after a warm-up. Times and rates come from a model, not from measurements, so compare rows only with each other.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import exp, log
from pathlib import Path
from typing import Any

from bench import common
from bench.compare import percentile

from . import traces
from .cache import BLOCK, Cache, Chain
from .orders import INFINITE, ORDERS, QUEUES, Order
from .traces import Session, Step

FORMATS = {"bf16": 131_072, "fp8": 65_536, "k4v4": 37_000}  # bytes per token: 32 layers, 8 KV heads, head_dim 128
GAIN = 0.25  # weight of a session's last pause in its typical pause
PRIOR_GAIN = 0.002  # and in the typical pause of all sessions
FIRST_PRIOR = 1000.0  # forwards
CHUNK = 8192  # tokens of a prefill step


@dataclass(frozen=True)
class Machine:
    """One GPU: bytes, tokens and bytes per second, seconds per output token."""

    memory: float = 55e9
    host_memory: float = 0.0
    token_bytes: float = FORMATS["k4v4"]
    prefill_rate: float = 12_000.0
    copy_rate: float = 50e9
    token_time: float = 0.02

    def blocks(self, num_bytes: float) -> int:
        return int(num_bytes / (self.token_bytes * BLOCK))


@dataclass(eq=False)
class Agent:
    draw: random.Random
    session: Session
    at: int  # step
    chain: Chain
    log_pause: float = 0.0  # running mean of the logarithms of its pauses


@dataclass(eq=False)
class Turn:
    """A prompt that waits or runs."""

    agent: Agent
    step: Step
    arrived: float
    computed_before: int  # total computed tokens at its arrival
    counts: bool  # false for the first prompt of an agent, which begins in the middle of a session
    overtaken: int = 0

    @property
    def tools(self) -> int:
        return self.agent.session.tools // BLOCK

    @property
    def own(self) -> int:
        return -(-self.step.prompt // BLOCK) - self.tools

    def hits(self) -> tuple[int, int]:
        """Tokens in device memory and in host memory."""
        chain, parent = self.agent.chain, self.agent.chain.parent
        device = min(parent.device, self.tools)
        host = min(parent.stored, self.tools) - device
        if device + host == self.tools:
            device, host = device + chain.device, host + chain.stored - chain.device
        most = self.step.prompt - 1
        on_device = min(device * BLOCK, most)
        return on_device, min(host * BLOCK, most - on_device)

    def cached(self) -> int:
        return sum(self.hits())

    def uncached(self) -> int:
        return self.step.prompt - self.cached()


@dataclass
class Totals:
    prompt: int = 0  # tokens
    device: int = 0  # of them from device memory
    host: int = 0  # from host memory
    again: int = 0  # tokens computed although the session's last prompt had them
    sessions: int = 0  # ended
    first_token: list[float] = field(default_factory=list)  # seconds from arrival


class Simulation:
    """`agents` agents, each with one session after the other of `sessions` in an order drawn from `seed`."""

    def __init__(
        self,
        sessions: Sequence[Session],
        machine: Machine,
        order: Order,
        pick: Callable[[list[Turn], int], Turn],
        agents: int,
        seed: int = 0,
    ):
        self.machine, self.pick = machine, pick
        self.cache = Cache(machine.blocks(machine.memory), machine.blocks(machine.host_memory), order)
        line = random.Random(seed).sample(sessions, len(sessions))
        self.line = itertools.cycle(line)
        self.tools: dict[int, Chain] = {}
        self.events: list[tuple[float, int, Callable, tuple]] = []
        self.number = itertools.count()
        self.waiting: list[Turn] = []
        self.prior = log(FIRST_PRIOR)
        self.now = self.forwards = 0.0
        self.copied_until = 0.0
        self.computed = self.running = 0
        self.computing = False
        self.totals = Totals()
        for i in range(agents):
            draw = random.Random(f"{seed} {i}")
            session = next(self.line)
            agent = Agent(draw, session, draw.randrange(len(session.steps)), self.new_chain(session), self.prior)
            self.after(draw.uniform(0, 30), self.arrive, agent, True)

    def new_chain(self, session: Session) -> Chain:
        return Chain(self.tools.setdefault(session.tools, Chain()), pause=exp(self.prior))

    def after(self, when: float, what: Callable, *args) -> None:
        heapq.heappush(self.events, (when, next(self.number), what, args))

    def run(self, warm_up: float, seconds: float) -> Totals:
        warm = False
        while self.events[0][0] < warm_up + seconds:
            when, _, what, args = heapq.heappop(self.events)
            if not warm and when >= warm_up:
                self.totals, warm = Totals(), True
            self.count_forwards(when)
            what(when, *args)
        return self.totals

    def count_forwards(self, now: float) -> None:
        """Forwards are the clock of a session's pauses, because all ranks of a server agree on them but not on the
        time."""
        step = CHUNK / self.machine.prefill_rate if self.computing else self.machine.token_time
        if self.running:
            self.forwards += (now - self.now) / step
        self.now = now

    # ---- the life of a turn

    def arrive(self, now: float, a: Agent, first: bool) -> None:
        step, chain = a.session.steps[a.at], a.chain
        if not first and a.at:
            self.learn(a, self.forwards - chain.ended)
            self.cache.cut(chain, max(0, step.shared // BLOCK - a.session.tools // BLOCK))
        chain.waits_since = chain.next_arrival = now
        self.waiting.append(Turn(a, step, now, self.computed, not first))
        self.serve(now)

    def learn(self, a: Agent, pause: float) -> None:
        """Update a session's typical pause, a running mean of logarithms that begins at the mean of all sessions."""
        x = log(max(pause, 1.0))
        a.log_pause += GAIN * (x - a.log_pause)
        self.prior += PRIOR_GAIN * (x - self.prior)
        a.chain.pause = exp(a.log_pause)

    def serve(self, now: float) -> None:
        """Begin the next prompt if none is being computed and its memory can be freed."""
        if self.computing or not self.waiting:
            return
        turn = self.pick(self.waiting, self.computed)
        chain, step = turn.agent.chain, turn.step
        parent, answer = chain.parent, -(-step.answer // BLOCK)
        self.cache.lock(chain)
        if not self.cache.make_room(
            max(0, turn.tools - parent.device) + max(0, turn.own - chain.device) + answer, now
        ):
            self.cache.unlock(chain)
            assert self.running, "the prompt does not fit an empty cache"
            return
        self.waiting.remove(turn)
        for other in self.waiting:
            other.overtaken += other.arrived < turn.arrived
        device, host = turn.hits()
        computed = step.prompt - device - host
        self.cache.extend(parent, max(turn.tools, parent.device))
        self.cache.extend(chain, max(turn.own, chain.device))
        self.cache.device += answer
        chain.waits_since = None
        for c in (chain, parent):
            c.used = now
            c.hits += 1
        self.computed += computed
        self.running += 1
        self.computing = True
        self.copied_until = max(now, self.copied_until) + host * self.machine.token_bytes / self.machine.copy_rate
        first_token = self.copied_until + computed / self.machine.prefill_rate
        if turn.counts:
            t = self.totals
            t.prompt += step.prompt
            t.device += device
            t.host += host
            t.again += max(0, min(step.shared, step.prompt - 1) - device - host)
            t.first_token.append(first_token - turn.arrived)
        self.after(first_token, self.decode, turn, answer)

    def decode(self, now: float, turn: Turn, answer: int) -> None:
        self.computing = False
        self.after(now + turn.step.answer * self.machine.token_time, self.finish, turn, answer)
        self.serve(now)

    def finish(self, now: float, turn: Turn, answer: int) -> None:
        a = turn.agent
        self.cache.device -= answer
        self.running -= 1
        for c in (a.chain, a.chain.parent):
            c.used, c.ended = now, self.forwards
        self.cache.unlock(a.chain)
        a.at += 1
        if a.at < len(a.session.steps):
            pause = a.session.steps[a.at].pause
        else:
            self.totals.sessions += 1
            a.chain.next_arrival = INFINITE
            a.chain.dead = True
            a.session, a.at, a.log_pause, pause = next(self.line), 0, self.prior, 10.0
            a.chain = self.new_chain(a.session)
        a.chain.next_arrival = now + pause
        self.after(now + pause, self.arrive, a, False)
        self.serve(now)


def row(runs: list[Totals], seconds: float) -> dict[str, float]:
    """Figures of runs with several seeds together. Shares are of prompt tokens; times in seconds."""
    waits, prompt = [x for t in runs for x in t.first_token], sum(t.prompt for t in runs)
    hours = len(runs) * seconds / 3600
    return {
        "from_device": sum(t.device for t in runs) / prompt,
        "from_host": sum(t.host for t in runs) / prompt,
        "from_cache": sum(t.device + t.host for t in runs) / prompt,
        "from_cache_least": min((t.device + t.host) / t.prompt for t in runs),  # of the seeds
        "computed_again": sum(t.again for t in runs) / prompt,
        "turns_h": len(waits) / hours,
        "sessions_h": sum(t.sessions for t in runs) / hours,
        "first_token_mean": sum(waits) / len(waits),
        **{f"first_token_p{round(100 * q)}": percentile(waits, q) for q in (0.5, 0.9, 0.99)},
        "first_token_most": max(waits),
    }


def settings(a: argparse.Namespace) -> list[tuple[str, str, str, float]]:
    """(format, eviction, admission, bytes of host memory) of each curve."""
    if a.orders or a.queues:
        orders, queues = (a.orders or "lru").split(","), (a.queues or "fcfs").split(",")
        return [(f, o, q, h) for f in a.formats.split(",") for o in orders for q in queues for h in (0.0, a.host)]
    plain = [("bf16", "lru", "fcfs", 0.0), ("fp8", "lru", "fcfs", 0.0)]
    plain += [("k4v4", order, "fcfs", 0.0) for order in ORDERS]
    plain += [("k4v4", "lru", queue, 0.0) for queue in QUEUES if queue != "fcfs"]
    plain += [("k4v4", order, "hrrn", 0.0) for order in ("reuse", "told", "clairvoyant")]
    plain += [("fp8", "lru", "hrrn", 0.0)]
    hosted = [("fp8", "lru", "fcfs"), ("fp8", "lru", "hrrn")]
    hosted += [("k4v4", o, q) for o in ("lru", "reuse", "told", "clairvoyant") for q in ("fcfs", "hrrn")]
    return plain + [(*setting, a.host) for setting in hosted]


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("traces", type=Path)
    p.add_argument("--split", choices=traces.SPLITS, default="report")
    p.add_argument("--agents", default="16,24,32,48,64")
    p.add_argument("--orders", default="", help=f"of eviction, separated by commas: {', '.join(ORDERS)}")
    p.add_argument("--queues", default="", help=f"of admission, separated by commas: {', '.join(QUEUES)}")
    p.add_argument("--formats", default="k4v4", help=f"with --orders or --queues: {', '.join(FORMATS)}")
    p.add_argument("--host", type=float, default=64e9, help="bytes of host memory of the curves that have any")
    p.add_argument("--longest", type=int, default=200_000, help="tokens of a prompt with its answer, at most")
    p.add_argument("--pause", type=float, default=300.0, help="longest pause in seconds; longer ones are cut to it")
    p.add_argument("--hours", type=float, default=2.0, help="that are counted, behind half an hour of warm-up")
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--no-write", action="store_true")
    return p.parse_args(argv)


def table(numbers: dict[str, Any]) -> str:
    lines = [f"{'format.eviction.admission':34}{'agents':>7}" + "".join(f"{c:>12}" for c in SHOWN)]
    for name, found in numbers.items():
        if name != "settings":
            setting, agents = name.rsplit(".a", 1)
            lines.append(f"{setting:34}{agents:>7}" + "".join(f"{found[key]:12.4g}" for key in SHOWN.values()))
    return "\n".join(lines)


SHOWN = {
    "cache": "from_cache", "host": "from_host", "again": "computed_again", "turns/h": "turns_h",
    "mean s": "first_token_mean", "p50 s": "first_token_p50", "p90 s": "first_token_p90", "p99 s": "first_token_p99",
}  # fmt: skip


def main() -> None:
    a = arguments()
    sessions = traces.load(a.traces, longest=a.longest, pause=a.pause, split=a.split)
    numbers: dict[str, Any] = {
        "settings": {k: getattr(a, k) for k in ("split", "longest", "pause", "hours", "seeds", "host")}
        | {"sessions": len(sessions), "endless": traces.endless_share(sessions), "simulated": True}
    }
    for fmt, order, queue, host in settings(a):
        name = ".".join((fmt, order, queue, *(["host"] if host else [])))
        for agents in map(int, a.agents.split(",")):
            machine = Machine(token_bytes=FORMATS[fmt], host_memory=host)
            runs = [
                Simulation(sessions, machine, ORDERS[order], QUEUES[queue], agents, seed).run(1800, a.hours * 3600)
                for seed in range(a.seeds)
            ]
            numbers[f"{name}.a{agents}"] = row(runs, a.hours * 3600)
    print(table(numbers))
    if not a.no_write:
        common.write_result("agents/simulated", numbers)


if __name__ == "__main__":
    main()
