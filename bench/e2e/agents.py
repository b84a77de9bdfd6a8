"""Agents in a closed loop, on servers with equal KV memory: prefix-cache hit rate and time of a step.

    python -m bench.e2e.agents --model <folder> --load-format dummy       # on a GPU: stock bf16 and fp8, ours
    ... --hicache-gib 64         # also stock fp8 with SGLang's hierarchical cache, in 64 GB of the host's memory
    ... --only bf16 --append     # adds to the result file; existing points are not measured again
    ... --data FILE              # of `python -m bench.quality.fetch tasks`, for machines without a network
    python -m bench.e2e.agents --curve 4,16 --join 1 --seconds 20 --tokens 10000    # CPU engine, a tiny model

A session is one or more dialogues of BFCL's multi-turn problems with long results: a shared system prompt with
functions, then user messages and results of functions. Each step sends the whole history and gets an answer as long as
the dialogue's call plus a thought of `--think` tokens; the model's actual answer becomes part of the history. Then the
function runs for a time that is exponentially distributed around `--pause` seconds, with a fixed seed. Meanwhile no
request holds the session's blocks. Random weights suffice, because only lengths matter.

For each number in `--curve`, that many agents run at a time from an empty cache, each one session after the other. An
agent begins somewhere in its first session, so that histories have typical lengths. The measured steps are those that
end within `--seconds` after every agent has had its first answer; the time before that is `ramp_s`. Unfinished steps
are aborted at the end.
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
from bench.quality.calls import INTRO, RESULT, described

NAME, SEED = "e2e/agents", 3
KEPT = ("join", "think", "read", "longest", "pause", "seconds")  # options that define the sessions
DONE = "Done."  # the answer when nothing is left to do, counted as one token
RAMP = 240  # seconds until every agent has had its first answer, at most


@dataclass(frozen=True)
class Step:
    sent: tuple[int, ...]  # tokens behind the history
    answer: int  # tokens
    parts: Counter  # kind of text -> tokens, of both, without the text of the chat template
    call: tuple[int, ...]  # tokens of the dialogue's own answer


@dataclass(frozen=True)
class Session:
    functions: tuple[str, ...]
    head: int  # first tokens, which sessions with the same functions share
    steps: tuple[Step, ...]

    @property
    def tokens(self) -> int:
        return sum(len(step.sent) + step.answer for step in self.steps)


@dataclass
class Seen:
    """One answered step."""

    prompt: int
    cached: int
    repeated: int  # prompt tokens that this session, or one with the same system prompt, sent or received earlier
    answer: int
    seconds: float
    ended: float  # time.monotonic()
    first: bool  # of its agent, which fills the cache


def template(tok) -> tuple[str, str, str, str]:
    """Text of the chat template around messages: before the system prompt, between it and the first user message,
    between an answer and the next user message, and between that and the next answer."""
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
    """Numbered sessions of `a.join` dialogues with the same functions; the same arguments, the same sessions.

    A session ends early if its history would exceed `a.longest` tokens. It begins with its number, so that sessions
    share no more than the system prompt although dialogues repeat.
    """

    def __init__(self, data: dict, essays: str, tok, a: argparse.Namespace):
        self.data, self.a = data, a
        self.tok, self.marks = tok, template(tok)
        self.pages = self.ids(essays) if a.read else ()
        self.groups: dict[tuple[str, ...], list[dict]] = {}
        for trace in data["traces"]:
            self.groups.setdefault(tuple(trace["classes"]), []).append(trace)
        self.dialogues = [(names, trace) for names, some in self.groups.items() for trace in some]
        random.Random(SEED).shuffle(self.dialogues)
        self.ids, self.session = lru_cache(1 << 16)(self.ids), lru_cache(1024)(self.session)

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tok(text, add_special_tokens=False).input_ids)

    def session(self, number: int) -> Session:
        begin, first, after, answer = self.marks
        draw, ids = random.Random(f"{SEED} session {number}"), self.ids
        names, trace = self.dialogues[number % len(self.dialogues)]
        known = {f["name"]: f for n in names for f in self.data["functions"][n]}
        head = ids(f"{begin}{INTRO}\n\n" + "\n".join(described(f) for f in known.values()) + first)
        others = draw.choices(self.groups[names], k=self.a.join - 1)
        steps: list[Step] = []
        sent, parts = [*head, *ids(f"Session {number}.\n")], Counter(functions=len(head))

        def ask(call: tuple[int, ...], tokens: int) -> None:
            nonlocal sent, parts
            length = self.a.think + tokens + 1
            steps.append(Step(tuple(sent), length, parts + Counter(answers=length), call))
            sent, parts = [], Counter()

        for turn in [turn for dialogue in [trace, *others] for turn in dialogue["turns"]]:
            said = ids(turn["user"] + answer)
            sent += said
            parts["users"] += len(said)
            for call, result in turn["calls"]:
                ask(ids(call), len(ids(call)))
                returned, filler = ids(f"{after}{RESULT}{result}\n"), self.filler(draw)
                sent += [*returned, *filler, *ids(answer)]
                parts += Counter(results=len(returned), filler=len(filler))
            ask(ids(DONE), 1)
            sent += ids(after)
        totals = itertools.accumulate(len(step.sent) + step.answer for step in steps)
        fitting = [step for step, total in zip(steps, totals) if total <= self.a.longest]
        return Session(names, len(head), tuple(fitting or steps[:1]))

    def filler(self, draw: random.Random) -> tuple[int, ...]:
        """Text of essays, about `--read` tokens: from a quarter of it to twice as much."""
        length = int(self.a.read * 2 ** draw.uniform(-2, 1))
        at = draw.randrange(len(self.pages)) if length else 0
        return tuple(itertools.islice(itertools.cycle(self.pages), at, at + length))

    def account(self, agents: int) -> dict:
        """Composition of the first sessions of `agents` agents: shares of tokens by kind of text, and lengths."""
        some = [self.session(i) for i in range(agents)]
        parts: Counter = sum((step.parts for s in some for step in s.steps), Counter())
        lengths = [s.tokens for s in some]
        kinds = ("functions", "users", "results", "filler", "answers")
        return {
            "shares": {kind: parts[kind] / sum(lengths) for kind in kinds},
            "tokens_mean": sum(lengths) / len(lengths),
            "tokens_longest": max(lengths),
            "steps_mean": sum(len(s.steps) for s in some) / len(some),
        }


class Load:
    """`agents` agents at one server."""

    def __init__(self, client: Client, made: Sessions, agents: int, pause: float):
        self.client, self.made, self.agents, self.pause = client, made, agents, pause
        self.lock, self.over, self.all_ran = threading.Lock(), threading.Event(), threading.Event()
        self.heads: set[tuple[str, ...]] = set()  # functions of system prompts that were sent
        self.started = 0  # agents that had their first answer
        self.seen: list[Seen] = []

    def run(self, seconds: float, ramp: float = RAMP) -> dict:
        """Run the agents, and summarize the steps that ended in the `seconds` after the ramp-up.

        Raises:
            RuntimeError: some agent had no answer after `ramp` seconds.
        """
        self.client.flush()
        began = time.monotonic()
        with ThreadPoolExecutor(self.agents) as pool:
            lives = [pool.submit(self.live, i) for i in range(self.agents)]
            ready = self.all_ran.wait(ramp)
            measured = time.monotonic()
            if ready:
                self.over.wait(seconds)  # set early if an agent failed
            ended = time.monotonic()
            self.over.set()
            self.client.post("/abort_request", {"abort_all": True})
            for life in lives:
                life.result()
        if not ready:
            raise RuntimeError(f"{self.started} of {self.agents} agents had an answer after {ramp:.0f} s")
        steps = [s for s in self.seen if not s.first and measured <= s.ended < ended]
        return {"ramp_s": measured - began, "measured_s": ended - measured, **summary(steps, ended - measured)}

    def live(self, agent: int) -> None:
        """Sessions `agent`, `agent + agents`, ..; the first from somewhere in it, behind random tokens as answers."""
        draw, first = random.Random(f"{SEED} agent {agent}"), True
        try:
            for number in itertools.count(agent, self.agents):
                session = self.made.session(number)
                skipped = draw.randrange(len(session.steps)) if first else 0
                history: list[int] = []
                for step in session.steps[:skipped]:
                    history += [*step.sent, *draw.choices(step.sent, k=step.answer)]
                known = self.known_head(session)
                for step in session.steps[skipped:]:
                    history += step.sent
                    answer = self.step(history, step, known, first)
                    if answer is None:
                        return
                    history += answer
                    first, known = False, len(history)
                    if self.over.wait(draw.expovariate(1 / self.pause) if self.pause else 0):
                        return
        except BaseException:
            self.over.set()
            raise

    def known_head(self, session: Session) -> int:
        with self.lock:
            known = session.functions in self.heads
            self.heads.add(session.functions)
        return session.head if known else 0

    def step(self, history: list[int], step: Step, known: int, first: bool) -> list[int] | None:
        """The answer; None where the run is over."""
        began = time.monotonic()
        try:
            answer = self.client.generate(history, step.answer)
        except RequestRefused:
            if self.over.is_set():
                return None
            raise
        if self.over.is_set():
            return None
        ended = time.monotonic()
        one = Seen(len(history), answer.cached_tokens, known, len(answer.ids), ended - began, ended, first)
        with self.lock:
            self.seen.append(one)
            self.started += first
            if self.started == self.agents:
                self.all_ran.set()
        return answer.ids


def summary(steps: list[Seen], seconds: float) -> dict:
    if not steps:
        raise RuntimeError(f"no step ended within {seconds:.0f} s; take more --seconds")
    taken, prompt = [s.seconds for s in steps], sum(s.prompt for s in steps)
    cached = sum(s.cached for s in steps)
    return {
        "steps": len(steps),
        "prompt_tokens": prompt,
        "computed_tokens": prompt - cached,
        "output_tokens": sum(s.answer for s in steps),
        "from_cache": cached / prompt,
        "sent_before": sum(s.repeated for s in steps) / prompt,
        "steps_s": len(steps) / seconds,
        "step_s_mean": sum(taken) / len(taken),
        "step_s_median": percentile(taken, 0.5),
        "step_s_p99": percentile(taken, 0.99),
    }


def servers(a: argparse.Namespace) -> dict[str, list[str]]:
    """name -> options; all with the memory of `a.tokens` bf16 tokens."""
    if not common.has_gpu():
        return small.servers(a, "--chunked-prefill-size", "512")
    only, a.only = a.only, ""
    a.server_args += f" --cuda-graph-max-bs-decode {max(a.curve)}"
    out = small.servers(a)
    if a.hicache_gib:
        extra = ["--enable-hierarchical-cache", "--hicache-size", str(a.hicache_gib)]
        fp8 = {name: options for name, options in out.items() if arms.is_variant(name, arms.FP8)}
        out |= {name.replace(arms.FP8, arms.HICACHE): [*options, *extra] for name, options in fp8.items()}
    a.only = only
    return arms.chosen(out, only)


def scores(numbers: dict[str, dict], a: argparse.Namespace) -> dict[str, Score]:
    """Hit rate and speedup in steps per second over stock at each point of the curve, for the first format. No scores
    if servers do not capture prefills, which is not the default, or on a CPU, where stock attends in plain torch."""
    if a.no_prefill_graphs or not common.has_gpu():
        return {}
    out, mine = {}, f"kvc_{a.formats.split(',')[0]}"
    for agents in a.curve:
        point = f"a{agents}"
        for server in arms.servers_at(numbers, point):
            row = numbers[f"{server}.{point}"]
            unit = f"share of the prompt tokens of {row['steps']} steps"
            which = "" if server.startswith("kvc") else arms.described(row["options"])
            out[f"agents.curve.{server}.{agents}"] = Score(row["from_cache"], unit, which)
        for name, stock in (("bf16", arms.BF16), ("fp8", arms.FP8), ("fp8_hicache", arms.HICACHE)):
            best = arms.fastest(numbers, stock, point, lambda row: row["steps_s"])
            if best and f"{mine}.{point}" in numbers:
                ratio = numbers[f"{mine}.{point}"]["steps_s"] / numbers[best]["steps_s"]
                out[f"agents.steps_vs_{name}.{agents}"] = Score(
                    ratio, "x steps/s", arms.described(numbers[best]["options"])
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
    p.add_argument("--curve", default="16,32,64,128,256", help="numbers of agents, one after the other")
    p.add_argument("--seconds", type=float, default=40, help="that are measured at each point, behind the ramp-up")
    p.add_argument("--join", type=int, default=1, help="dialogues in a session")
    p.add_argument("--think", type=int, default=64, help="tokens of an answer besides the call")
    p.add_argument("--read", type=int, default=0, help="tokens of essays that a result brings along besides, about")
    p.add_argument("--longest", type=int, default=65536, help="tokens of a history; a session ends before it has more")
    p.add_argument("--pause", type=float, default=2.0, help="mean seconds between an answer and the next step")
    p.add_argument("--hicache-gib", type=int, default=0, help="host memory of stock fp8's second tier; 0: none")
    p.add_argument("--data", type=Path, help="file of `bench.quality.fetch tasks`; default: a new one")
    a = small.arguments(p, argv, tokens=120_000, name=NAME)
    a.curve = [int(n) for n in a.curve.split(",")]
    return a


def main() -> None:
    a = arguments()
    a.model = small.model(a)
    data = taskdata.load(a.data or fetch.tasks())
    made = Sessions(data["agents_long"], data["essays"], prompts.tokenizer(a.model), a)
    numbers = serving.earlier(a)
    numbers["sessions"] = made.account(max(a.curve)) | {k: getattr(a, k) for k in KEPT}
    print(numbers["sessions"], flush=True)
    for name, options in servers(a).items():
        todo = [agents for agents in a.curve if f"{name}.a{agents}" not in numbers]
        if not todo:
            continue
        with common.Server(options, model=a.model) as server:
            Load(server.client, made, 4, 0.0).run(3)  # compile and warm up
            for agents in todo:
                before = server.log.read_text(errors="replace").count("Retract requests")
                row = Load(server.client, made, agents, a.pause).run(a.seconds)
                after = server.log.read_text(errors="replace").count("Retract requests")
                numbers |= serving.earlier(a)  # a call on another GPU may have added to it
                row |= {"retractions": after - before, "options": options, "command": common.command_line()}
                numbers[f"{name}.a{agents}"] = row
                print(table({f"{name}.a{agents}": row}), flush=True)
                common.write_result(a.name, numbers, scores=scores(numbers, a), quiet=True)
            if errors := server.errors():
                raise RuntimeError(f"{name}: {errors}")
    print(table(numbers))


if __name__ == "__main__":
    main()
