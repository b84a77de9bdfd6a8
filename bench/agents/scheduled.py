"""Agents against SGLang's scheduler and this cache without a model: when does a server collapse?

    python -m bench.agents.scheduled TRACES.json.gz      # to bench/results/agents/scheduled.json
    ... --agents 56 --servers share-1,share-0.5+interval-4 --seconds 60 --no-write
    ... --host-gb 32 --agents 80,96,112,128              # with host memory; to agents/scheduled_host.json

The scheduler, the radix tree, admission, eviction and all accounts of memory are those of a server. Forwards compute
nothing, and their times are modeled. As in SGLang, a decode step runs only if no prompt can be prefilled, so prefills
stall decoding. Loads from host memory take no time. The load is that of `bench.e2e.agent_replay` with
`--length-scale 0.25 --time-scale 0.25`. Times are modeled, so compare rows only with each other.

A server is named by its options (`bench.agents.options`). Clients that send `steps` know each pause to the nearest
2.5 s.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import itertools
import random
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.sampling.sampling_params import SamplingParams
from triton.runtime.jit import JITFunction

from bench import common
from bench.compare import percentile
from bench.e2e.agent_replay import scaled
from bench.scheduler import ModelFreeScheduler, configured
from kvc_kernels.store import PageStore
from kvc_patches import requests
from kvc_patches import scheduler as hooks
from sglang_kvc.adapter.allocator import KvcAllocator
from sglang_kvc.adapter.radix_cache import KvcRadixCache
from sglang_kvc.cache.build import build_runtime
from sglang_kvc.cache.runtime import Runtime

from . import traces
from .options import Options
from .traces import Session, Step

SCALE = 0.25  # of lengths and pauses
LONGEST, PAUSE = 120_000, 300.0  # unscaled tokens and seconds
ROWS, CHUNK, CONTEXT = 128, 8192, 32_768
HEAD_DIM = 128  # of the only layer and head
TOKEN_BYTES = 131_072  # of K and V of a token of the modeled 8B model in bf16
TOKENS = 50_000  # size of the vocabulary of prompts


@dataclass(frozen=True)
class Machine:
    """tokens: capacity of the KV cache in bf16. host_memory: bytes of host memory, 0: none. prefill_rate: tokens per
    second. decode_time, launch_time: seconds of a decode step, and of a prefill beyond its tokens. A prefill that
    includes a decode step takes as long as both."""

    tokens: int = 105_000
    host_memory: int = 0
    prefill_rate: float = 30_000.0
    decode_time: float = 0.008
    launch_time: float = 0.004


@dataclass(eq=False)
class Turn:
    """A prompt that was sent, its cached tokens, and the times at which it was sent and had its first token."""

    agent: Agent
    step: Step
    req: Req
    sent: float
    counts: bool  # false for an agent's first prompt
    cached: int = 0
    first: float = 0.0


@dataclass(eq=False)
class Agent:
    """An agent at step `at` of a session. `tokens`: its last prompt, whose first `tools` tokens describe tools."""

    draw: random.Random
    steps: list[Step] = field(default_factory=list)
    at: int = 0
    tokens: array = field(default_factory=lambda: array("q"))
    tools: int = 0

    def begin(self, session: Session, at: int) -> None:
        self.steps, self.at, self.tools = list(session.steps), at, session.tools
        self.tokens = array("q", random.Random(session.tools).choices(range(TOKENS), k=session.tools))

    def prompt(self) -> array:
        step = self.steps[self.at]
        kept = max(step.shared if self.at else 0, min(self.tools, step.prompt))
        prefix = self.tokens[:kept]
        self.tokens = prefix + array("q", self.draw.choices(range(TOKENS), k=step.prompt - len(prefix)))
        return self.tokens


class Server(ModelFreeScheduler):
    """The scheduler, with a clock that forwards advance."""

    def __init__(self, runtime: Runtime, machine: Machine):
        pool = ReqToTokenPool(ROWS, CONTEXT, "cpu", enable_memory_saver=False)
        allocator = KvcAllocator(runtime, SimpleNamespace(runtime=runtime), "cpu")
        tree = KvcRadixCache(CacheInitParams(False, pool, allocator, runtime.layout.block_tokens))
        super().__init__(pool, allocator, tree, rows=ROWS, page_size=runtime.layout.block_tokens, chunk=CHUNK)
        self.runtime, self.machine, self.now = runtime, machine, 0.0
        self.policy = SchedulePolicy("hrrn", tree, False, False, False)
        if runtime.config.host_memory:
            ranks = SimpleNamespace(tp_size=1, dp_size=1, nnodes=1, enable_dp_attention=False)
            tree.init_hicache(ranks, None)
            self.enable_hierarchical_cache = True
        self.processed_tokens_counter = 0

    def submit(self, rid: str, prompt: array, answer: int, hints: dict[str, Any]) -> Req:
        params = SamplingParams(max_new_tokens=answer, ignore_eos=True, custom_params=hints or None)
        params.normalize(None)
        req = Req(rid, "", prompt, params, vocab_size=1 << 30)
        requests.before_add_request_to_queue(self, req)
        self._add_request_to_queue(req)
        return req

    def get_new_batch_prefill(self, running_batch):
        return hooks.around_get_new_batch_prefill(Scheduler.get_new_batch_prefill, self, running_batch)

    def run_batch(self, batch, pp_proxy_tensors=None):
        hooks.before_run_batch(self, batch, None)
        if batch.forward_mode.is_extend():
            decoding = len(batch.decoding_reqs or ())
            self.processed_tokens_counter += batch.extend_num_tokens
            new_tokens = batch.extend_num_tokens - decoding
            self.now += self.machine.launch_time + new_tokens / self.machine.prefill_rate
            self.now += self.machine.decode_time if decoding else 0
        else:
            self.now += self.machine.decode_time
        self.runtime.flush()
        return GenerationBatchResult(next_token_ids=torch.full((len(batch.reqs),), 7))

    def process_batch_result(self, batch, result):
        processor = self.batch_result_processor
        decodes = batch.forward_mode.is_decode()
        (processor.process_batch_result_decode if decodes else processor.process_batch_result_prefill)(batch, result)
        hooks.after_process_batch_result(None, self, batch, result)

    def turn(self) -> bool:
        """One scheduling pass with its forward; returns whether there was one."""
        plan = self.get_next_batch_to_run(running_batch=self.running_batch, last_batch=self.last_batch)
        self.running_batch, batch = plan.running_batch, plan.batch_to_run
        if batch:
            self.process_batch_result(batch, self.run_batch(batch))
        else:
            hooks.before_on_idle(self)
        self.last_batch = batch
        return bool(batch)


def make_runtime(machine: Machine, options: Options) -> Runtime:
    """A cache in `k4v4` with memory for as many tokens as that of `machine`, of one layer and head."""
    token_bytes = 4 * HEAD_DIM
    config = options.config(machine.host_memory * token_bytes // TOKEN_BYTES)
    return build_runtime(
        config, num_bytes=machine.tokens * token_bytes, layers=1, heads=1, head_dim=HEAD_DIM,
        dtype=torch.bfloat16, device="cpu",
    )  # fmt: skip


class Replay:
    """Agents in a closed loop with `server`; see `bench.agents.simulate`."""

    def __init__(self, server: Server, options: Options, sessions: Sequence[Session], agents: int, seed: int):
        self.server, self.options, self.numbers = server, options, itertools.count()
        self.line = itertools.cycle(random.Random(seed).sample(sessions, len(sessions)))
        self.due: list[tuple[float, int, Agent, bool]] = []
        self.turns: dict[str, Turn] = {}
        self.ended: list[tuple[Turn, float]] = []
        for i in range(agents):
            draw = random.Random(f"{seed} {i}")
            agent, session = Agent(draw), next(self.line)
            agent.begin(session, draw.randrange(len(session.steps)))
            self.after(draw.uniform(0, 30), agent, False)

    def after(self, when: float, agent: Agent, counts: bool) -> None:
        heapq.heappush(self.due, (when, next(self.numbers), agent, counts))

    def run(self, until: float) -> None:
        server = self.server
        while server.now < until:
            while self.due and self.due[0][0] <= server.now:
                when, number, agent, counts = heapq.heappop(self.due)
                step = agent.steps[agent.at]
                hints = self.options.hints(agent.steps, agent.at, SCALE)
                req = server.submit(str(number), agent.prompt(), max(1, step.answer), hints)
                self.turns[req.rid] = Turn(agent, step, req, when, counts)
            if not server.turn() and not server.waiting_queue:
                server.now = max(server.now, self.due[0][0])
            self.note()

    def note(self) -> None:
        """Note first tokens and ends, and plan the next prompts."""
        now = self.server.now
        for rid, turn in list(self.turns.items()):
            if not turn.first and turn.req.output_ids:
                turn.first, turn.cached = now, turn.req.cached_tokens
            if turn.req.finished():
                del self.turns[rid]
                self.ended.append((turn, now))
                agent, pause = turn.agent, 10.0 * SCALE
                agent.at += 1
                if agent.at < len(agent.steps):
                    pause = agent.steps[agent.at].pause
                else:
                    agent.begin(next(self.line), 0)
                self.after(now + pause, agent, True)


def row(runs: list[list[tuple[Turn, float]]], seconds: float) -> dict[str, float]:
    """Figures of the answers that ended in the measured time, over runs with several seeds."""
    turns = [(t, end) for run in runs for t, end in run if t.counts]
    first = [t.first - t.sent for t, _ in turns]
    each = [(end - t.first) / max(1, len(t.req.output_ids) - 1) for t, end in turns]
    prompt = sum(t.step.prompt for t, _ in turns)
    return {
        "from_cache": sum(t.cached for t, _ in turns) / prompt,
        "from_cache_least": min(
            sum(t.cached for t, _ in run if t.counts) / sum(t.step.prompt for t, _ in run if t.counts) for run in runs
        ),
        "answers_h": 3600 * len(turns) / seconds / len(runs),
        "first_token_s_p50": percentile(first, 0.5),
        "first_token_s_p90": percentile(first, 0.9),
        "first_token_s_most": max(first),
        "output_token_s_p90": percentile(each, 0.9),
    }


def play(
    sessions: Sequence[Session], machine: Machine, options: Options, agents: int, seed: int, warm_up: float,
    seconds: float,
) -> list[tuple[Turn, float]]:
    """Turns that end in `seconds` after `warm_up`, with their ends."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(JITFunction, "run", lambda *args, **options: None))
        stack.enter_context(mock.patch.object(PageStore, "use_kernels", True))
        runtime = make_runtime(machine, options)
        stack.enter_context(
            configured(runtime, rows=ROWS, chunk=CHUNK, mixed=options.mixed, interval=options.interval)
        )
        replay = Replay(Server(runtime, machine), options, sessions, agents, seed)
        replay.run(warm_up)
        replay.ended.clear()
        replay.run(warm_up + seconds)
    return replay.ended


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("traces", type=Path)
    p.add_argument("--agents", default="32,40,48,56,64,96", help="numbers of agents, separated by commas")
    p.add_argument("--servers", default="default,share-1,share-0.5", help="separated by commas")
    p.add_argument("--warm-up", type=float, default=120.0, help="seconds that do not count")
    p.add_argument("--seconds", type=float, default=300.0, help="measured seconds")
    p.add_argument("--seeds", type=int, default=2)
    p.add_argument("--host-gb", type=float, default=0, help="host memory in gigabytes")
    p.add_argument("--name", help="of the result file; default: agents/scheduled, with host memory scheduled_host")
    p.add_argument("--no-write", action="store_true")
    args = p.parse_args()
    torch.set_num_threads(1)
    machine = Machine(host_memory=int(args.host_gb * 1e9))
    sessions = [scaled(s, SCALE, SCALE) for s in traces.load(args.traces, longest=LONGEST, pause=PAUSE)]
    numbers: dict[str, Any] = {
        "settings": vars(machine)
        | {k: getattr(args, k) for k in ("warm_up", "seconds", "seeds")}
        | {"sessions": len(sessions), "scale": SCALE, "simulated": True}
    }
    for server in args.servers.split(","):
        options = Options.parse(server)
        for agents in map(int, args.agents.split(",")):
            began = time.perf_counter()
            runs = [play(sessions, machine, options, agents, i, args.warm_up, args.seconds) for i in range(args.seeds)]
            name = f"{server}.a{agents}"
            numbers[name] = figures = row(runs, args.seconds)
            took = time.perf_counter() - began
            print(name, " ".join(f"{k} {v:.4g}" for k, v in figures.items()), f"({took:.0f} s)", flush=True)
    if not args.no_write:
        name = "agents/scheduled_host" if machine.host_memory else "agents/scheduled"
        common.write_result(args.name or name, numbers)


if __name__ == "__main__":
    main()
