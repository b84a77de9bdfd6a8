"""Closed-loop benchmark of agents on servers with equal KV memory: prefix-cache hit rate and step time.

    python -m bench.e2e.agents --model <folder> --load-format dummy       # on a GPU: stock bf16 and fp8, ours
    ... --hicache-gib 64         # also stock fp8 with SGLang's hierarchical cache in 64 GB of host memory
    ... --only bf16 --append     # add to the result file; existing points are not measured again
    ... --data FILE              # output of `python -m bench.quality.fetch tasks`, for machines without a network
    python -m bench.e2e.agents --curve 4,16 --join 1 --seconds 20 --tokens 10000    # CPU engine, a tiny model

A session joins one or more dialogues from BFCL's multi-turn problems with long results: a shared system prompt with
functions, then user messages and function results. Each step sends the entire history. The answer is as long as the
dialogue's call plus `--think` tokens, and the generated tokens become part of the history. The function then runs for
an exponentially distributed time with mean `--pause` seconds and a fixed seed. During that time no request locks the
session's blocks. Random weights suffice, because only lengths matter.

For each number in `--curve`, that many agents start with an empty cache and play one session after another. An agent
starts at a random step of its first session, so that histories have typical lengths. The measurement starts when every
agent has had its first answer (after `ramp_s`), and lasts `--seconds`. Unfinished steps are then aborted.
"""

from __future__ import annotations

import argparse
import itertools
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from bench import common, prompts
from bench.client import Client, RequestRefused
from bench.common import Score
from bench.compare import percentile
from bench.e2e import arms, serving, small
from bench.quality import fetch, taskdata
from bench.quality.calls import INTRO, RESULT, describe

NAME, SEED = "e2e/agents", 3
SESSION_OPTIONS = ("join", "think", "read", "longest", "pause", "seconds")  # recorded in the result file
DONE = "Done."  # the final answer to the user, counted as one token
RAMP = 240  # maximum seconds until every agent has had its first answer


@dataclass(frozen=True)
class Step:
    sent: tuple[int, ...]  # tokens appended to the history
    answer: int  # tokens
    parts: Counter  # kind of text -> tokens of `sent` and the answer, without the chat template
    call: tuple[int, ...]  # tokens of the dialogue's call, or of `DONE`


@dataclass(frozen=True)
class Session:
    functions: tuple[str, ...]
    head: int  # number of first tokens that sessions with the same functions share
    steps: tuple[Step, ...]

    @property
    def tokens(self) -> int:
        return sum(len(step.sent) + step.answer for step in self.steps)


@dataclass
class AnsweredStep:
    """One answered step, in tokens and seconds."""

    prompt: int
    cached: int
    repeated: int  # prompt tokens that this session, or another one with the same system prompt, processed earlier
    answer: int
    seconds: float
    ended: float  # time.monotonic()
    first: bool  # the agent's first step, which fills the cache


def template(tok) -> tuple[str, str, str, str]:
    """Chat template text before the system prompt, between it and the first user message, between an answer and the
    next user message, and between that message and the next answer."""
    marks = ["@@system@@", "@@first@@", "@@answer@@", "@@next@@"]
    roles = ["system", "user", "assistant", "user"]
    messages = [{"role": r, "content": m} for r, m in zip(roles, marks)]
    text = tok.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    parts = []
    for mark in marks:
        part, text = text.split(mark)
        parts.append(part)
    return parts[0], parts[1], parts[3], text


class Sessions:
    """Reproducible, numbered sessions of `args.join` dialogues with the same functions.

    A session ends early if its history would exceed `args.longest` tokens. Its first message starts with its number, so
    that sessions share only the system prompt, although dialogues repeat.
    """

    def __init__(self, data: dict, essays: str, tok, args: argparse.Namespace):
        self.data, self.args = data, args
        self.tok, self.marks = tok, template(tok)
        self.essay_ids = self.ids(essays) if args.read else ()
        self.groups: dict[tuple[str, ...], list[dict]] = {}
        for trace in data["traces"]:
            self.groups.setdefault(tuple(trace["classes"]), []).append(trace)
        self.dialogues = [(names, trace) for names, group in self.groups.items() for trace in group]
        random.Random(SEED).shuffle(self.dialogues)
        self.ids, self.session = lru_cache(1 << 16)(self.ids), lru_cache(1024)(self.session)

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tok(text, add_special_tokens=False).input_ids)

    def session(self, number: int) -> Session:
        begin, first, after, answer = self.marks
        rng, ids = random.Random(f"{SEED} session {number}"), self.ids
        names, trace = self.dialogues[number % len(self.dialogues)]
        functions = {f["name"]: f for n in names for f in self.data["functions"][n]}
        head = ids(f"{begin}{INTRO}\n\n" + "\n".join(describe(f) for f in functions.values()) + first)
        joined = [trace, *rng.choices(self.groups[names], k=self.args.join - 1)]
        steps: list[Step] = []
        sent, parts = [*head, *ids(f"Session {number}.\n")], Counter(functions=len(head))

        def end_step(call: tuple[int, ...], tokens: int) -> None:
            nonlocal sent, parts
            length = self.args.think + tokens + 1
            steps.append(Step(tuple(sent), length, parts + Counter(answers=length), call))
            sent, parts = [], Counter()

        for turn in [turn for dialogue in joined for turn in dialogue["turns"]]:
            message = ids(turn["user"] + answer)
            sent += message
            parts["users"] += len(message)
            for call, result in turn["calls"]:
                end_step(ids(call), len(ids(call)))
                returned, filler = ids(f"{after}{RESULT}{result}\n"), self.filler(rng)
                sent += [*returned, *filler, *ids(answer)]
                parts += Counter(results=len(returned), filler=len(filler))
            end_step(ids(DONE), 1)
            sent += ids(after)
        totals = itertools.accumulate(len(step.sent) + step.answer for step in steps)
        fitting = [step for step, total in zip(steps, totals) if total <= self.args.longest]
        return Session(names, len(head), tuple(fitting or steps[:1]))

    def filler(self, rng: random.Random) -> tuple[int, ...]:
        """Essay text, a quarter to twice of `--read` tokens long."""
        length = int(self.args.read * 2 ** rng.uniform(-2, 1))
        at = rng.randrange(len(self.essay_ids)) if length else 0
        return tuple(itertools.islice(itertools.cycle(self.essay_ids), at, at + length))

    def composition(self, agents: int) -> dict:
        """Composition of the first `agents` sessions: token shares by kind of text, and lengths."""
        sessions = [self.session(i) for i in range(agents)]
        parts: Counter = sum((step.parts for s in sessions for step in s.steps), Counter())
        lengths = [s.tokens for s in sessions]
        kinds = ("functions", "users", "results", "filler", "answers")
        return {
            "shares": {kind: parts[kind] / sum(lengths) for kind in kinds},
            "tokens_mean": sum(lengths) / len(lengths),
            "tokens_longest": max(lengths),
            "steps_mean": sum(len(s.steps) for s in sessions) / len(sessions),
        }


class Load:
    """Closed loop of `agents` agents at one server."""

    def __init__(self, client: Client, sessions: Sessions, agents: int, pause: float):
        self.client, self.sessions, self.agents, self.pause = client, sessions, agents, pause
        self.lock, self.stop, self.ramped_up = threading.Lock(), threading.Event(), threading.Event()
        self.heads: set[tuple[str, ...]] = set()  # functions of the system prompts sent so far
        self.started = 0  # agents that had their first answer
        self.answered: list[AnsweredStep] = []

    def run(self, seconds: float, ramp: float = RAMP) -> dict:
        """Run the agents, and summarize the steps that ended in the `seconds` after the ramp-up.

        Raises:
            RuntimeError: some agent had no answer after `ramp` seconds.
        """
        self.client.flush()
        began = time.monotonic()
        with ThreadPoolExecutor(self.agents) as pool:
            running = [pool.submit(self.run_agent, i) for i in range(self.agents)]
            ready = self.ramped_up.wait(ramp)
            measured = time.monotonic()
            if ready:
                self.stop.wait(seconds)  # set early if an agent failed
            ended = time.monotonic()
            self.stop.set()
            self.client.post("/abort_request", {"abort_all": True})
            for future in running:
                future.result()
        if not ready:
            raise RuntimeError(f"{self.started} of {self.agents} agents had an answer after {ramp:.0f} s")
        steps = [s for s in self.answered if not s.first and measured <= s.ended < ended]
        return {"ramp_s": measured - began, "measured_s": ended - measured, **summary(steps, ended - measured)}

    def run_agent(self, agent: int) -> None:
        """Play sessions `agent`, `agent + agents`, .. The first one starts at a random step, with random tokens in
        place of its earlier answers."""
        rng, first = random.Random(f"{SEED} agent {agent}"), True
        try:
            for number in itertools.count(agent, self.agents):
                session = self.sessions.session(number)
                skipped = rng.randrange(len(session.steps)) if first else 0
                history: list[int] = []
                for step in session.steps[:skipped]:
                    history += [*step.sent, *rng.choices(step.sent, k=step.answer)]
                repeated = self.known_head(session)
                for step in session.steps[skipped:]:
                    history += step.sent
                    answer = self.step(history, step, repeated, first)
                    if answer is None:
                        return
                    history += answer
                    first, repeated = False, len(history)
                    if self.stop.wait(rng.expovariate(1 / self.pause) if self.pause else 0):
                        return
        except BaseException:
            self.stop.set()
            raise

    def known_head(self, session: Session) -> int:
        with self.lock:
            known = session.functions in self.heads
            self.heads.add(session.functions)
        return session.head if known else 0

    def step(self, history: list[int], step: Step, repeated: int, first: bool) -> list[int] | None:
        """Tokens of the answer; None if the run has ended."""
        began = time.monotonic()
        try:
            answer = self.client.generate(history, step.answer)
        except RequestRefused:
            if self.stop.is_set():
                return None
            raise
        if self.stop.is_set():
            return None
        ended = time.monotonic()
        row = AnsweredStep(len(history), answer.cached_tokens, repeated, len(answer.ids), ended - began, ended, first)
        with self.lock:
            self.answered.append(row)
            self.started += first
            if self.started == self.agents:
                self.ramped_up.set()
        return answer.ids


def summary(steps: list[AnsweredStep], seconds: float) -> dict:
    if not steps:
        raise RuntimeError(f"no step ended within {seconds:.0f} s; take more --seconds")
    times, prompt = [s.seconds for s in steps], sum(s.prompt for s in steps)
    cached = sum(s.cached for s in steps)
    return {
        "steps": len(steps),
        "prompt_tokens": prompt,
        "computed_tokens": prompt - cached,
        "output_tokens": sum(s.answer for s in steps),
        "from_cache": cached / prompt,
        "sent_before": sum(s.repeated for s in steps) / prompt,
        "steps_s": len(steps) / seconds,
        "step_s_mean": sum(times) / len(times),
        "step_s_median": percentile(times, 0.5),
        "step_s_p99": percentile(times, 0.99),
    }


def servers(args: argparse.Namespace) -> dict[str, list[str]]:
    """Name -> options of a server. All servers have the KV memory of `args.tokens` bf16 tokens."""
    if not common.has_gpu():
        return small.servers(args, "--chunked-prefill-size", "512")
    only, args.only = args.only, ""
    args.server_args += f" --cuda-graph-max-bs-decode {max(args.curve)}"
    out = small.servers(args)
    if args.hicache_gib:
        hicache = ["--enable-hierarchical-cache", "--hicache-size", str(args.hicache_gib)]
        fp8 = {name: options for name, options in out.items() if arms.is_variant(name, arms.FP8)}
        out |= {name.replace(arms.FP8, arms.HICACHE): [*options, *hicache] for name, options in fp8.items()}
    args.only = only
    return arms.select(out, only)


def scores(numbers: dict[str, dict], args: argparse.Namespace) -> dict[str, Score]:
    """Hit rate, and speedup in steps per second over stock, at each point of the curve, for the first format. Runs
    without prefill graphs (not the default) and on a CPU (where stock's attention is plain torch) give no scores."""
    if args.no_prefill_graphs or not common.has_gpu():
        return {}
    out, ours = {}, f"kvc_{args.formats.split(',')[0]}"
    for agents in args.curve:
        point = f"a{agents}"
        for server in arms.servers_at(numbers, point):
            row = numbers[f"{server}.{point}"]
            unit = f"share of the prompt tokens of {row['steps']} steps"
            baseline = "" if server.startswith("kvc") else arms.describe(row["options"])
            out[f"agents.curve.{server}.{agents}"] = Score(row["from_cache"], unit, baseline)
        for name, stock in (("bf16", arms.BF16), ("fp8", arms.FP8), ("fp8_hicache", arms.HICACHE)):
            best = arms.fastest(numbers, stock, point, lambda row: row["steps_s"])
            if best and f"{ours}.{point}" in numbers:
                ratio = numbers[f"{ours}.{point}"]["steps_s"] / numbers[best]["steps_s"]
                out[f"agents.steps_vs_{name}.{agents}"] = Score(
                    ratio, "x steps/s", arms.describe(numbers[best]["options"])
                )
    return out


COLUMNS = (
    "steps", "from_cache", "sent_before", "steps_s", "step_s_mean", "step_s_median", "step_s_p99", "ramp_s",
    "retractions",
)  # fmt: skip


def table(numbers: dict[str, dict]) -> str:
    rows = {name: row for name, row in numbers.items() if "steps_s" in row}
    lines = [f"{'server.agents':28}" + "".join(f"{c:>14}" for c in COLUMNS)]
    lines += [f"{name:28}" + "".join(f"{row[c]:14.4g}" for c in COLUMNS) for name, row in rows.items()]
    return "\n".join(lines)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--curve", default="16,32,64,128,256", help="numbers of agents, separated by commas")
    p.add_argument("--seconds", type=float, default=40, help="measured time of each point, after the ramp-up")
    p.add_argument("--join", type=int, default=1, help="dialogues per session")
    p.add_argument("--think", type=int, default=64, help="tokens of an answer in addition to the call")
    p.add_argument("--read", type=int, default=0, help="approximate number of essay tokens added to each result")
    p.add_argument("--longest", type=int, default=65536, help="maximum tokens of a session")
    p.add_argument("--pause", type=float, default=2.0, help="mean seconds between an answer and the next step")
    p.add_argument("--hicache-gib", type=int, default=0, help="host memory of stock fp8's hierarchical cache; 0: none")
    p.add_argument("--data", type=Path, help="output of `bench.quality.fetch tasks`; default: download it")
    args = small.arguments(p, argv, tokens=120_000, name=NAME)
    args.curve = [int(n) for n in args.curve.split(",")]
    return args


def main() -> None:
    args = arguments()
    args.model = small.model(args)
    data = taskdata.load(args.data or fetch.tasks())
    sessions = Sessions(data["agents_long"], data["essays"], prompts.tokenizer(args.model), args)
    numbers = serving.earlier_rows(args)
    numbers["sessions"] = sessions.composition(max(args.curve)) | {k: getattr(args, k) for k in SESSION_OPTIONS}
    print(numbers["sessions"], flush=True)
    for name, options in servers(args).items():
        todo = [agents for agents in args.curve if f"{name}.a{agents}" not in numbers]
        if not todo:
            continue
        with common.Server(options, model=args.model) as server:
            Load(server.client, sessions, 4, 0.0).run(3)  # compile and warm up
            for agents in todo:
                before = server.log.read_text(errors="replace").count("Retract requests")
                row = Load(server.client, sessions, agents, args.pause).run(args.seconds)
                after = server.log.read_text(errors="replace").count("Retract requests")
                numbers |= serving.earlier_rows(args)  # a concurrent call on another GPU may have added rows
                row |= {"retractions": after - before, "options": options, "command": common.command_line()}
                numbers[f"{name}.a{agents}"] = row
                print(table({f"{name}.a{agents}": row}), flush=True)
                common.write_result(args.name, numbers, scores=scores(numbers, args), quiet=True)
            if errors := server.errors():
                raise RuntimeError(f"{name}: {errors}")
    print(table(numbers))


if __name__ == "__main__":
    main()
