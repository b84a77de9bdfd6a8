"""Agents in a closed loop at any OpenAI-compatible server: time to first token over their number.

    python -m bench.e2e.agent_replay TRACES.json.gz --url http://127.0.0.1:30000 --server mine    # a running server
    ... --arm kvc,stock_fp8 --model <folder> --load-format dummy --tokens 420000   # starts them in turn; --list-arms
    ... --curve 16,32,48,64 --seconds 600 --time-scale 0.5 --append      # adds to the result file
    ... --until-missed                                  # ends the curve behind the first number that misses a target
    python -m bench.e2e.agent_replay --plot                             # the result file as a picture
    python -m bench.e2e.agent_replay --workload bfcl --data FILE ..     # dialogues with real tool outputs

TRACES is described in `bench.agents.traces`. Each agent plays one session after the other, the first from somewhere in
it. A prompt has the recorded length, and its recorded first tokens are those of the prompt before; all other tokens are
drawn from a seed. The answer has the recorded length (`ignore_eos`) and is not sent back. A prompt is sent when the
recorded pause, times `--time-scale`, has passed since the last answer.

`--workload bfcl` plays BFCL's dialogues instead (`bench.e2e.dialogues`), whose text is tokenized with the tokenizer of
`--model`. A `--length-scale` below 1 cuts each text at its end. Functions take `--tool-seconds` on average.

Prompts go to `/v1/completions` as lists of token ids, or as words with `--text` where a server takes no ids. Answers
count that end within `--seconds` after every agent has had its first one. What comes from the cache is known where the
server reports `cached_tokens` (SGLang: `--enable-cache-report`), bytes that moved between tiers where `/server_info`
is ours.

`agent_targets` compares the most agents at the targets.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol
from urllib.request import Request, urlopen

import requests

from bench import common
from bench.agents import traces
from bench.agents.traces import Session, Step
from bench.common import RESULTS
from bench.compare import percentile
from bench.e2e import dialogues
from bench.e2e.agent_targets import FIRST_TOKEN_S, holds, most_agents, points, scores
from bench.e2e.dialogues import Dialogue
from bench.e2e.serving import named

TRACES, BFCL = "traces", "bfcl"
NAMES = {TRACES: "e2e/agent_replay", BFCL: "e2e/agent_replay_bfcl"}  # of the result files
SCORES = {TRACES: "agents", BFCL: "agents.bfcl"}
TITLES = {TRACES: "Recorded coding agents", BFCL: "Agents in BFCL's dialogues"}
TOKENS = range(1000, 9000)  # ids that prompts are drawn from; every vocabulary has them
WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")
TIMEOUT = 1800


# ---- what is sent


def scaled(session: Session, length: float, pause: float) -> Session:
    """`session` with `length` times as many tokens and `pause` times as long pauses."""

    def tokens(n: int) -> int:
        return max(1, round(n * length))

    steps = [Step(tokens(s.prompt), round(s.shared * length), tokens(s.answer), s.pause * pause) for s in session.steps]
    return Session(session.name, round(session.tools * length), tuple(steps))


def prompts(session: Session, unique: str) -> Iterator[tuple[Step, list[int]]]:
    """Steps and their prompts as token ids. Sessions with equally many tokens of tools begin with the same ones; all
    else is the session's own, which `unique` names. A dialogue has its own text."""
    if isinstance(session, Dialogue):
        mark = random.Random(f"{session.name} {unique}").choices(TOKENS, k=dialogues.MARK)
        yield from session.prompts(mark)
        return
    tools = random.Random(f"tools {session.tools}").choices(TOKENS, k=session.tools)
    draw, before = random.Random(f"{session.name} {unique}"), tools
    for step in session.steps:
        kept = before[: max(step.shared, min(session.tools, step.prompt))]
        before = [*kept, *draw.choices(TOKENS, k=step.prompt - len(kept))]
        yield step, before


# ---- one request


@dataclass
class Answer:
    """Seconds from sending to the first token and to the last one; tokens as the server counts them, None if it does
    not say."""

    first_token: float
    seconds: float
    tokens: int
    prompt: int | None = None
    cached: int | None = None


class Server(Protocol):
    def complete(self, prompt: list[int], answer: int) -> Answer: ...


@dataclass
class Completions:
    """`/v1/completions` of any server, streamed."""

    url: str
    model: str = "default"
    text: bool = False

    def complete(self, prompt: list[int], answer: int) -> Answer:
        said: Any = " ".join(WORDS[i % len(WORDS)] for i in prompt) if self.text else prompt
        body = {"model": self.model, "prompt": said, "max_tokens": answer, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        began, first, usage, chunks = time.monotonic(), None, {}, 0
        sent = Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urlopen(sent, timeout=TIMEOUT) as response:  # `requests` hands out lines late
            for line in response:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                event = json.loads(line[len(b"data: ") :])
                usage = event.get("usage") or usage
                if event.get("choices"):
                    chunks += 1
                    first = first or time.monotonic()
        ended = time.monotonic()
        details = usage.get("prompt_tokens_details") or {}
        return Answer(
            (first or ended) - began, ended - began, usage.get("completion_tokens", chunks),
            usage.get("prompt_tokens"), details.get("cached_tokens"),
        )  # fmt: skip


# ---- the closed loop


@dataclass
class Seen:
    """One answered prompt. shared: its tokens that were sent before, by its session or as tools of another one."""

    answer: Answer
    prompt: int
    shared: int
    ended: float
    first: bool  # of its agent
    last: bool  # of its session


class Replay:
    """`agents` agents at `server`: agent i plays sessions i, i + agents, .., and the first one follows the last."""

    def __init__(self, server: Server, sessions: Sequence[Session], agents: int, seed: int = 0):
        self.server, self.sessions, self.agents, self.seed = server, sessions, agents, seed
        self.lock, self.over, self.all_ran = threading.Lock(), threading.Event(), threading.Event()
        self.seen: list[Seen] = []
        self.tools: set[tuple[int, ...]] = set()  # that were sent
        self.started = 0

    def run(self, seconds: float, ramp: float, progress: float = 10.0) -> dict[str, Any]:
        """Play, and sum up what ended in the `seconds` after every agent's first answer, which takes `ramp` at most."""
        with ThreadPoolExecutor(self.agents) as pool:
            lives = [pool.submit(self.live, i) for i in range(self.agents)]
            began = time.monotonic()
            self.all_ran.wait(ramp)
            started, measured = self.started, time.monotonic()
            while not self.over.wait(min(progress, max(0.0, measured + seconds - time.monotonic()))):
                gone = time.monotonic() - measured
                print(f"  {self.agents} agents, {gone:5.0f} s: {len(self.seen)} answers", flush=True)
                if time.monotonic() >= measured + seconds:
                    break
            ended = time.monotonic()
            self.over.set()
            for life in lives:
                life.result()
        if started < self.agents:
            raise RuntimeError(f"{started} of {self.agents} agents had an answer after {ramp:.0f} s; give more --ramp")
        inside = [s for s in self.seen if not s.first and measured <= s.ended <= ended]
        return {"ramp_s": measured - began, "measured_s": ended - measured, **summary(inside, ended - measured)}

    def live(self, agent: int) -> None:
        draw, first = random.Random(f"{self.seed} {agent}"), True
        try:
            for number in itertools.count(agent, self.agents):
                session = self.sessions[number % len(self.sessions)]
                skipped = draw.randrange(len(session.steps)) if first else 0
                for i, (step, prompt) in enumerate(prompts(session, f"{self.seed} {number}")):
                    if i == 0 and self.are_new(prompt[: session.tools]):
                        step = replace(step, shared=0)
                    if i < skipped:
                        continue
                    if not first and self.over.wait(step.pause):
                        return
                    answer = self.server.complete(prompt, step.answer)
                    self.note(answer, step, first, i == len(session.steps) - 1)
                    first = False
                    if self.over.is_set():
                        return
        except BaseException:
            self.over.set()
            self.all_ran.set()
            raise

    def are_new(self, tools: list[int]) -> bool:
        with self.lock:
            new = tuple(tools) not in self.tools
            self.tools.add(tuple(tools))
        return new

    def note(self, answer: Answer, step: Step, first: bool, last: bool) -> None:
        with self.lock:
            self.seen.append(Seen(answer, step.prompt, step.shared, time.monotonic(), first, last))
            self.started += first
            if self.started == self.agents:
                self.all_ran.set()


def summary(seen: Sequence[Seen], seconds: float) -> dict[str, Any]:
    """Shares are of prompt tokens; None where the server does not say what came from its cache."""
    if not seen:
        raise RuntimeError(f"no answer ended within {seconds:.0f} s; give more --seconds")
    first = [s.answer.first_token for s in seen]
    rest = [(s.answer.seconds - s.answer.first_token) / (s.answer.tokens - 1) for s in seen if s.answer.tokens > 1]
    known = [s for s in seen if s.answer.cached is not None and s.answer.prompt]
    total = sum(s.answer.prompt for s in known)
    # SGLang adds what a retracted request finds when it resumes, which may be more than its prompt.
    cached = sum(min(s.answer.cached, s.answer.prompt) for s in known)
    out: dict[str, Any] = {"answers": len(seen), "answers_h": 3600 * len(seen) / seconds}
    out["sessions_h"] = 3600 * sum(s.last for s in seen) / seconds
    out["from_cache"] = cached / total if known else None
    again = sum(max(0, min(s.shared, s.prompt - 1) - s.answer.cached) for s in known)
    out["computed_again"] = again / total if known else None
    for name, values in (("first_token_s", first), ("output_token_s", rest or [0.0])):
        out |= {f"{name}_p{round(100 * q)}": percentile(values, q) for q in (0.5, 0.9, 0.99)}
    return out


# ---- servers


def arms(a: argparse.Namespace) -> dict[str, list[str]]:
    """name -> options of SGLang's server, all with the KV memory of `--tokens` bf16 tokens and the same order of
    admission. FlashAttention 3 reads fp8 faster from pages of 128 tokens."""
    memory, host = ["--max-total-tokens"], str(a.host_gb)
    attention = ["--attention-backend", common.default_attention()] if common.has_gpu() else []
    fp8 = ["--kv-cache-dtype", "fp8_e4m3", "--page-size", "128"]
    stock = common.stock(*memory, str(a.tokens), *attention, *a.server_args.split())
    half = common.stock(*memory, str(2 * a.tokens), *attention, *fp8, *a.server_args.split())
    ours = common.kvc("k4v4", *memory, str(a.tokens), *a.server_args.split(), memory=None)
    agents = ["--kvc-host-memory", f"{host}GB", "--kvc-eviction", "reuse"]
    every = {
        "stock_bf16": stock,
        "stock_fp8": half,
        "stock_fp8_hicache": [*half, "--enable-hierarchical-cache", "--hicache-size", host],
        "kvc": ours,
        "kvc_tiers": [*ours, *agents],
    }
    shared = ["--schedule-policy", "hrrn", "--enable-cache-report"]
    return {name: [*options, *shared] for name, options in every.items()}


def moved(url: str) -> dict[str, float]:
    """Totals of the blocks that our server has moved between tiers; empty for others."""
    with contextlib.suppress(requests.RequestException, ValueError, KeyError, IndexError):
        state = requests.get(f"{url}/server_info", timeout=60).json()["internal_states"][0]["kvc"]["stats"]
        return {k: v for k, v in state.items() if k.startswith(("host_", "disk_")) and isinstance(v, (int, float))}
    return {}


def recorded(a: argparse.Namespace) -> dict[str, Any]:
    """The rows of the result file that this run goes on with; other runs may add to it meanwhile."""
    path = RESULTS / f"{a.name}.json"
    return json.loads(path.read_text())["numbers"] if a.append and path.exists() else {}


def settings_of(a: argparse.Namespace, sessions: Sequence[Session]) -> dict[str, Any]:
    """What all rows of a result file have in common."""
    fields = ("tokens", "host_gb", "seconds", "time_scale", "length_scale", "longest", "pause")
    own = {k: getattr(a, k) for k in fields} | {"workload": a.workload}
    own |= {k: getattr(a, k) for k in dialogues.OPTIONS} if a.workload == BFCL else {}
    own |= {"sessions": len(sessions), "endless": traces.endless_share(sessions)}
    if recorded(a).get("settings", own) != own:
        raise SystemExit(f"error: {a.name}.json has rows of other settings; give them again, or another --name")
    return own


def measure(a: argparse.Namespace, url: str, sessions: Sequence[Session], options: Sequence[str] = ()) -> None:
    model = requests.get(f"{url}/v1/models", timeout=60).json()["data"][0]["id"]
    settings = settings_of(a, sessions)
    own: dict[str, Any] = {}
    for agents in map(int, a.curve.split(",")):
        if f"{a.server}.a{agents}" in recorded(a):
            continue
        before = moved(url)
        replay = Replay(Completions(url, model, a.text), sessions, agents, seed=agents)
        row = replay.run(a.seconds, a.ramp)
        after = moved(url)
        row["tiers"] = {k: [before[k], v] for k, v in after.items() if k in before}
        own[f"{a.server}.a{agents}"] = row | {"options": list(options), "command": common.command_line()}
        shown = {k: v for k, v in row.items() if k not in ("tiers", "ramp_s")}
        print(f"{a.server}.a{agents}", " ".join(f"{k} {v:.4g}" for k, v in shown.items() if v is not None), flush=True)
        numbers = recorded(a) | own | {"settings": settings}
        numbers["most_agents"] = most_agents(numbers)
        scored = scores(numbers, settings["endless"], SCORES[a.workload])
        common.write_result(a.name, numbers, scores=scored, quiet=True)
        if a.until_missed and not holds(row):
            break


def plot(name: str, title: str) -> None:
    """One curve for each server: the 90th percentile of the time to the first token over the number of agents."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    record = json.loads((RESULTS / f"{name}.json").read_text())
    figure, axis = pyplot.subplots(figsize=(6.5, 4))
    for server, rows in points(record["numbers"]).items():
        axis.plot([n for n, _ in rows], [row["first_token_s_p90"] for _, row in rows], "o-", label=server)
    axis.axhline(FIRST_TOKEN_S, color="#999999", linestyle=":")
    axis.set(xlabel="agents", ylabel="time to first token, p90, s", yscale="log")
    axis.set_title(f"{title} on one {record['device']}", fontsize=10)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(RESULTS / f"{name}.png", dpi=130)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("traces", type=Path, nargs="?")
    p.add_argument("--workload", default=TRACES, choices=list(NAMES))
    p.add_argument("--url", help="of a running server")
    p.add_argument("--arm", help="servers to start instead, one after the other, separated by commas; see --list-arms")
    p.add_argument("--list-arms", action="store_true", help="print the command of each server")
    p.add_argument("--plot", action="store_true", help="draw the result file and end")
    p.add_argument("--server", default="", help="name in the results of the server at --url; default: `server`")
    p.add_argument("--model", help="for --arm, and the tokenizer of bfcl; default: the demo model")
    p.add_argument("--load-format", default="auto")
    p.add_argument("--server-args", default="", help="more options for every arm")
    p.add_argument("--tokens", type=int, default=420_000, help="bf16 tokens whose memory every arm gets")
    p.add_argument("--host-gb", type=int, default=64, help="host memory of the arms that use it")
    p.add_argument("--curve", default="16,24,32,48,64", help="numbers of agents")
    p.add_argument("--seconds", type=float, default=600, help="that are counted at each point")
    p.add_argument("--ramp", type=float, default=600, help="until every agent has had an answer, at most")
    p.add_argument("--time-scale", type=float, default=1.0, help="of the recorded pauses")
    p.add_argument("--length-scale", type=float, default=1.0, help="of the recorded lengths, for small servers")
    p.add_argument("--longest", type=int, default=120_000, help="recorded tokens of a prompt with its answer, at most")
    p.add_argument("--pause", type=float, default=300.0, help="longest recorded pause, in seconds")
    p.add_argument("--text", action="store_true", help="send words, for servers that take no token ids")
    p.add_argument("--until-missed", action="store_true", help="end the curve behind the first number that misses")
    p.add_argument("--append", action="store_true", help="go on with the result file")
    p.add_argument("--name", help="of the result file; default: one for each card")
    dialogues.add_options(p)
    a = p.parse_args(argv)
    a.name = a.name or named(NAMES[a.workload])
    if not (a.list_arms or a.plot) and ((a.traces is None) == (a.workload == TRACES) or bool(a.url) == bool(a.arm)):
        p.error("give the traces or --workload bfcl, and either --url or --arm")
    if a.text and a.workload == BFCL:
        p.error("--text needs traces, because the prompts of bfcl are token ids")
    if unknown := {*(a.arm or "").split(",")} - {"", *arms(a)}:
        p.error(f"--arm knows {', '.join(arms(a))}, not {', '.join(sorted(unknown))}")
    a.server = a.server or "server"
    return a


def load(a: argparse.Namespace) -> Sequence[Session]:
    if a.workload == BFCL:
        return dialogues.load(a)
    sessions = traces.load(a.traces, longest=a.longest, pause=a.pause)
    return [scaled(s, a.length_scale, a.time_scale) for s in sessions]


def main() -> None:
    a = arguments()
    if a.plot:
        return plot(a.name, TITLES[a.workload])
    if a.list_arms:
        for name, options in arms(a).items():
            print(f"{name}:\n  python -m sglang.launch_server --model-path {a.model or '<folder>'} {' '.join(options)}")
        return None
    sessions = load(a)
    if a.url:
        return measure(a, a.url.rstrip("/"), sessions)
    for arm in a.arm.split(","):
        with common.Server([*arms(a)[arm], "--load-format", a.load_format], model=a.model) as server:
            a.server = arm
            measure(a, server.client.url, sessions, server.args)
        a.append = True  # the next arm keeps the rows of this one
    return None


if __name__ == "__main__":
    main()
