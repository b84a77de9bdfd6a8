"""Simulation of coding agents in a closed loop on one GPU: prefix-cache hit rate and latency by eviction and admission
order.

    python -m bench.agents.simulate TRACES.json.gz        # split `report`, to bench/results/agents/simulated.json
    ... --split tune --agents 24,48 --orders lru,reuse --queues fcfs,hrrn --no-write

`bench.agents.traces` describes TRACES. Each agent plays one session after another and starts at a random step of its
first session. A prompt arrives when the recorded pause after the last answer is over. Prompts are prefilled one by one.
Decoding takes a fixed time per token and runs in parallel. Blocks of running prompts are locked. A warm-up does not
count. Times and rates are modeled, so compare rows only with each other.
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
GAIN = 0.25  # weight of the last pause in the session's typical pause
PRIOR_GAIN = 0.002  # weight of the last pause in the typical pause of all sessions
FIRST_PRIOR = 1000.0  # forwards
CHUNK = 8192  # tokens of a prefill step


@dataclass(frozen=True)
class Machine:
    """Model of one GPU, in bytes, tokens per second, bytes per second, and seconds per output token."""

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
    log_pause: float = 0.0  # running mean of the logarithms of the session's pauses


@dataclass(eq=False)
class Turn:
    """A waiting or running prompt."""

    agent: Agent
    step: Step
    arrived: float
    computed_before: int  # total number of computed tokens at its arrival
    counts: bool  # false for an agent's first prompt, which starts in the middle of a session
    overtaken: int = 0

    @property
    def tools(self) -> int:
        return self.agent.session.tools // BLOCK

    @property
    def blocks(self) -> int:
        """Blocks of the prompt after the tool definitions."""
        return -(-self.step.prompt // BLOCK) - self.tools

    def hits(self) -> tuple[int, int]:
        """Tokens in device memory and in host memory."""
        chain, parent = self.agent.chain, self.agent.chain.parent
        device = min(parent.device, self.tools)
        host = min(parent.stored, self.tools) - device
        if device + host == self.tools:
            device, host = device + chain.device, host + chain.stored - chain.device
        limit = self.step.prompt - 1
        device_tokens = min(device * BLOCK, limit)
        return device_tokens, min(host * BLOCK, limit - device_tokens)

    def demoted(self) -> int:
        """Tokens in demoted blocks."""
        chain = self.agent.chain
        return sum(chain.parent.lowered[: self.tools] + chain.lowered) * BLOCK

    def cached(self) -> int:
        return sum(self.hits())

    def uncached(self) -> int:
        return self.step.prompt - self.cached()


@dataclass
class Totals:
    prompt: int = 0  # prompt tokens
    device: int = 0  # prompt tokens from device memory
    host: int = 0  # prompt tokens from host memory
    demoted: int = 0  # prompt tokens from demoted blocks
    again: int = 0  # recomputed tokens of the session's previous prompt
    sessions: int = 0  # ended sessions
    first_token: list[float] = field(default_factory=list)  # seconds from arrival


class Simulation:
    """Simulation of `agents` agents that play `sessions` in a random order with the seed `seed`."""

    def __init__(
        self,
        sessions: Sequence[Session],
        machine: Machine,
        order: Order,
        pick: Callable[[list[Turn], int], Turn],
        agents: int,
        seed: int = 0,
        cache: Cache | None = None,
    ):
        self.machine, self.pick = machine, pick
        self.cache = cache or Cache(machine.blocks(machine.memory), machine.blocks(machine.host_memory), order)
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
        """Advance the number of forwards, which is the clock for pauses, because all ranks of a server agree on it but
        not on the time."""
        step = CHUNK / self.machine.prefill_rate if self.computing else self.machine.token_time
        if self.running:
            self.forwards += (now - self.now) / step
        self.now = now

    # ---- events of a turn

    def arrive(self, now: float, agent: Agent, first: bool) -> None:
        step, chain = agent.session.steps[agent.at], agent.chain
        if not first and agent.at:
            self.learn(agent, max(self.forwards - chain.ended, 1.0) / max(1, chain.steps))
            self.cache.cut(chain, max(0, step.shared // BLOCK - agent.session.tools // BLOCK))
        chain.waits_since = chain.next_arrival = now
        self.waiting.append(Turn(agent, step, now, self.computed, not first))
        self.serve(now)

    def learn(self, agent: Agent, pause: float) -> None:
        """Update a session's typical pause per step, a running mean of logarithms that starts at the mean of all
        sessions."""
        x = log(pause)
        agent.log_pause += GAIN * (x - agent.log_pause)
        self.prior += PRIOR_GAIN * (x - self.prior)
        agent.chain.pause = exp(agent.log_pause)

    def serve(self, now: float) -> None:
        """Start the next prompt if none is being computed and enough memory can be freed."""
        if self.computing or not self.waiting:
            return
        turn = self.pick(self.waiting, self.computed)
        chain, step = turn.agent.chain, turn.step
        parent, answer = chain.parent, -(-step.answer // BLOCK)
        self.cache.lock(chain)
        blocks = max(0, turn.tools - parent.device) + max(0, turn.blocks - chain.device) + answer
        if not self.cache.make_room(blocks, now):
            self.cache.unlock(chain)
            assert self.running, "the prompt does not fit an empty cache"
            return
        self.waiting.remove(turn)
        for other in self.waiting:
            other.overtaken += other.arrived < turn.arrived
        (device, host), demoted = turn.hits(), turn.demoted()
        computed = step.prompt - device - host
        self.cache.extend(parent, max(turn.tools, parent.device))
        self.cache.extend(chain, max(turn.blocks, chain.device))
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
            t.demoted += demoted
            t.again += max(0, min(step.shared, step.prompt - 1) - device - host)
            t.first_token.append(first_token - turn.arrived)
        self.after(first_token, self.decode, turn, answer)

    def decode(self, now: float, turn: Turn, answer: int) -> None:
        self.computing = False
        self.after(now + turn.step.answer * self.machine.token_time, self.finish, turn, answer)
        self.serve(now)

    def finish(self, now: float, turn: Turn, answer: int) -> None:
        agent = turn.agent
        self.cache.device -= answer
        self.running -= 1
        for c in (agent.chain, agent.chain.parent):
            c.used, c.ended = now, self.forwards
        self.cache.unlock(agent.chain)
        agent.at += 1
        if agent.at < len(agent.session.steps):
            pause = agent.session.steps[agent.at].pause
            agent.chain.steps = self.cache.order.steps(pause)
        else:
            self.totals.sessions += 1
            agent.chain.next_arrival = INFINITE
            agent.chain.dead = True
            agent.session, agent.at, agent.log_pause, pause = next(self.line), 0, self.prior, 10.0
            agent.chain = self.new_chain(agent.session)
        agent.chain.next_arrival = now + pause
        self.after(now + pause, self.arrive, agent, False)
        self.serve(now)


def row(runs: list[Totals], seconds: float) -> dict[str, float]:
    """Figures over runs with several seeds. Shares are of prompt tokens, times in seconds."""
    waits, prompt = [x for t in runs for x in t.first_token], sum(t.prompt for t in runs)
    hours = len(runs) * seconds / 3600
    return {
        "from_device": sum(t.device for t in runs) / prompt,
        "from_host": sum(t.host for t in runs) / prompt,
        "from_cache": sum(t.device + t.host for t in runs) / prompt,
        "from_cache_least": min((t.device + t.host) / t.prompt for t in runs),
        "computed_again": sum(t.again for t in runs) / prompt,
        "turns_h": len(waits) / hours,
        "sessions_h": sum(t.sessions for t in runs) / hours,
        "first_token_mean": sum(waits) / len(waits),
        **{f"first_token_p{round(100 * q)}": percentile(waits, q) for q in (0.5, 0.9, 0.99)},
        "first_token_most": max(waits),
    }


def settings(args: argparse.Namespace) -> list[tuple[str, str, str, float]]:
    """(format, eviction, admission, bytes of host memory) of each curve."""
    if args.orders or args.queues:
        orders, queues = (args.orders or "lru").split(","), (args.queues or "fcfs").split(",")
        return [(f, o, q, h) for f in args.formats.split(",") for o in orders for q in queues for h in (0.0, args.host)]
    curves = [("bf16", "lru", "fcfs", 0.0), ("fp8", "lru", "fcfs", 0.0)]
    curves += [("k4v4", order, "fcfs", 0.0) for order in ORDERS]
    curves += [("k4v4", "lru", queue, 0.0) for queue in QUEUES if queue != "fcfs"]
    curves += [("k4v4", order, "hrrn", 0.0) for order in ("reuse", "told", "planned", "clairvoyant")]
    curves += [("fp8", "lru", "hrrn", 0.0)]
    hosted = [("fp8", "lru", "fcfs"), ("fp8", "lru", "hrrn")]
    hosted += [("k4v4", o, q) for o in ("lru", "reuse", "told", "planned", "clairvoyant") for q in ("fcfs", "hrrn")]
    return curves + [(*setting, args.host) for setting in hosted]


def parser(description: str | None) -> argparse.ArgumentParser:
    """Parser of the arguments that describe the load."""
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("traces", type=Path)
    p.add_argument("--split", choices=traces.SPLITS, default="report")
    p.add_argument("--agents", default="16,24,32,48,64", help="numbers of agents, separated by commas")
    p.add_argument("--longest", type=int, default=200_000, help="maximum tokens of a prompt and its answer")
    p.add_argument("--pause", type=float, default=300.0, help="maximum pause in seconds; longer ones are cut")
    p.add_argument("--hours", type=float, default=2.0, help="measured time, after half an hour of warm-up")
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--no-write", action="store_true")
    return p


def load(args: argparse.Namespace) -> tuple[list[Session], dict[str, Any]]:
    """The sessions, and the settings that a result file records."""
    sessions = traces.load(args.traces, longest=args.longest, pause=args.pause, split=args.split)
    kept = {k: getattr(args, k) for k in ("split", "longest", "pause", "hours", "seeds")}
    return sessions, kept | {"sessions": len(sessions), "endless": traces.endless_share(sessions), "simulated": True}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    p = parser(__doc__)
    p.add_argument("--orders", default="", help=f"eviction orders, separated by commas: {', '.join(ORDERS)}")
    p.add_argument("--queues", default="", help=f"admission orders, separated by commas: {', '.join(QUEUES)}")
    p.add_argument("--formats", default="k4v4", help=f"formats, with --orders or --queues: {', '.join(FORMATS)}")
    p.add_argument("--host", type=float, default=64e9, help="bytes of host memory, for curves with a host tier")
    return p.parse_args(argv)


def table(numbers: dict[str, Any]) -> str:
    lines = [f"{'format.eviction.admission':34}{'agents':>7}" + "".join(f"{c:>12}" for c in COLUMNS)]
    for name, figures in numbers.items():
        if name != "settings":
            setting, agents = name.rsplit(".a", 1)
            lines.append(f"{setting:34}{agents:>7}" + "".join(f"{figures[key]:12.4g}" for key in COLUMNS.values()))
    return "\n".join(lines)


COLUMNS = {
    "cache": "from_cache", "host": "from_host", "again": "computed_again", "turns/h": "turns_h",
    "mean s": "first_token_mean", "p50 s": "first_token_p50", "p90 s": "first_token_p90", "p99 s": "first_token_p99",
}  # fmt: skip


def main() -> None:
    args = arguments()
    sessions, kept = load(args)
    numbers: dict[str, Any] = {"settings": kept | {"host": args.host}}
    for fmt, order, queue, host in settings(args):
        name = ".".join((fmt, order, queue, *(["host"] if host else [])))
        for agents in map(int, args.agents.split(",")):
            machine = Machine(token_bytes=FORMATS[fmt], host_memory=host)
            runs = [
                Simulation(sessions, machine, ORDERS[order], QUEUES[queue], agents, seed).run(1800, args.hours * 3600)
                for seed in range(args.seeds)
            ]
            numbers[f"{name}.a{agents}"] = row(runs, args.hours * 3600)
    print(table(numbers))
    if not args.no_write:
        common.write_result("agents/simulated", numbers)


if __name__ == "__main__":
    main()
