"""Replay of agents against any OpenAI-compatible server: time to first token by number of agents.

    python -m bench.e2e.agent_replay TRACES.json.gz --url http://127.0.0.1:30000 --server NAME    # a running server
    python -m bench.e2e.agent_replay --workload bfcl --data FILE ..      # dialogues with real function results
    ... --arm kvc,stock_fp8 --model <folder> --load-format dummy --tokens 420000   # start these servers one by one
    ... --arm kvc+share-0.5+done,stock_fp8+interval-16  # with the options of `bench.agents.options`
    ... --list-arms                                     # print the command of each server
    ... --curve 16,32,48,64 --seconds 600 --time-scale 0.5 --append      # add to the result file
    ... --until-missed                                  # stop at the first number of agents that misses a target
    python -m bench.e2e.agent_replay --plot             # plot the result file

`bench.agents.traces` describes TRACES. Each agent plays one session after another and starts at a random step of its
first session. Prompts and answers have their recorded lengths (`ignore_eos`). A prompt shares the recorded number of
first tokens with the previous prompt; its other tokens are drawn with a fixed seed. Answers are not sent back. An agent
sends its next prompt once the recorded pause, times `--time-scale`, has passed since the last answer.

`--workload bfcl` replays dialogues from BFCL instead (`bench.e2e.dialogues`). The tokenizer of `--model` encodes their
text. A `--length-scale` below 1 cuts each text at its end. A function runs for `--tool-seconds` on average, times
`--time-scale`.

Prompts go to `/v1/completions` as token ids. `--text` sends words to servers that take no ids. The measurement starts
when every agent has had its first answer, and lasts `--seconds`. Cache hits are known if the server reports
`cached_tokens` (SGLang: `--enable-cache-report`). Transfers between tiers are known if it runs this plug-in or reports
the metrics of SGLang's hierarchical cache (`--enable-metrics`).

`agent_targets` compares servers by the number of agents that they serve within the latency targets.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import requests

from bench import common
from bench.agents import traces
from bench.agents.traces import Session, Step
from bench.common import RESULTS
from bench.compare import percentile
from bench.e2e import dialogues
from bench.e2e.agent_servers import arm, arms, tier_counters
from bench.e2e.agent_targets import FIRST_TOKEN_S, meets_targets, most_agents, points, scores
from bench.e2e.completions import Answer, Completions, Server
from bench.e2e.dialogues import Dialogue
from bench.e2e.serving import result_name

TRACES, BFCL = "traces", "bfcl"
NAMES = {TRACES: "e2e/agent_replay", BFCL: "e2e/agent_replay_bfcl"}  # result files
SCORE_PREFIXES = {TRACES: "agents", BFCL: "agents.bfcl"}
LABELS = {  # of servers in plots
    "stock_bf16": "stock bf16",
    "stock_fp8": "stock fp8",
    "stock_fp8_hicache": "stock fp8, hierarchical cache",
    "kvc": "kvc (k4v4)",
    "kvc_tiers": "kvc, host memory",
    "kvc_disk": "kvc, host memory and disk",
}
TITLES = {TRACES: "Recorded coding agents", BFCL: "Agents in BFCL's dialogues"}
TOKENS = range(1000, 9000)  # ids that prompts are drawn from; every vocabulary has them
Hints = Callable[[Sequence[Step], int], dict[str, Any]]


# ---- prompts


def scaled(session: Session, length: float, pause: float) -> Session:
    """`session` with its token counts multiplied by `length` and its pauses by `pause`."""

    def tokens(n: int) -> int:
        return max(1, round(n * length))

    steps = [Step(tokens(s.prompt), round(s.shared * length), tokens(s.answer), s.pause * pause) for s in session.steps]
    return Session(session.name, round(session.tools * length), tuple(steps))


def prompts(session: Session, unique: str) -> Iterator[tuple[Step, list[int]]]:
    """Steps and their prompts as token ids. Sessions with equal numbers of tool tokens share these tokens. All other
    tokens depend on the session and on `unique`. The tokens of a dialogue come from its text."""
    if isinstance(session, Dialogue):
        mark = random.Random(f"{session.name} {unique}").choices(TOKENS, k=dialogues.MARK)
        yield from session.prompts(mark)
        return
    tools = random.Random(f"tools {session.tools}").choices(TOKENS, k=session.tools)
    rng, prompt = random.Random(f"{session.name} {unique}"), tools
    for step in session.steps:
        prefix = prompt[: max(step.shared, min(session.tools, step.prompt))]
        prompt = [*prefix, *rng.choices(TOKENS, k=step.prompt - len(prefix))]
        yield step, prompt


# ---- the closed loop


@dataclass
class Job:
    """A session from its first prompt to its last answer. An agent's first session counts from the step at which the
    agent starts. `seconds` includes the `pauses`."""

    seconds: float
    pauses: float


@dataclass
class AnsweredPrompt:
    """One answered prompt. `shared`: number of its tokens that were also in the session's previous prompt. The first
    prompt of a dialogue shares its tool tokens if an earlier session had the same ones."""

    answer: Answer
    prompt: int
    shared: int
    ended: float
    first: bool  # the agent's first prompt
    job: Job | None = None  # the session, if this was its last prompt


class Replay:
    """`agents` agents that send prompts to `server`. Agent i plays sessions i, i + agents, .., modulo their number.

    `hints`: the hints with a prompt, from the steps of its session and the prompt's step."""

    def __init__(
        self, server: Server, sessions: Sequence[Session], agents: int, seed: int = 0, hints: Hints = lambda *step: {}
    ):
        self.server, self.sessions, self.agents, self.seed, self.hints = server, sessions, agents, seed, hints
        self.lock, self.stop, self.ramped_up = threading.Lock(), threading.Event(), threading.Event()
        self.answered: list[AnsweredPrompt] = []
        self.known_tools: set[tuple[int, ...]] = set()  # tool tokens of the sessions started so far
        self.started = 0

    def run(
        self, seconds: float, ramp: float, progress: float = 10.0, counters: Callable[[], dict[str, float]] = dict
    ) -> dict[str, Any]:
        """Run the agents and summarize the answers of the measured `seconds`. The measurement starts when every agent
        has had its first answer. `tiers` has the server's `counters` at its start and end.

        Raises:
            RuntimeError: some agent had no answer after `ramp` seconds.
        """
        with ThreadPoolExecutor(self.agents) as pool:
            running = [pool.submit(self.run_agent, i) for i in range(self.agents)]
            began = time.monotonic()
            self.ramped_up.wait(ramp)
            before = counters()
            started, measured = self.started, time.monotonic()
            while not self.stop.wait(min(progress, max(0.0, measured + seconds - time.monotonic()))):
                elapsed = time.monotonic() - measured
                print(f"  {self.agents} agents, {elapsed:5.0f} s: {len(self.answered)} answers", flush=True)
                if time.monotonic() >= measured + seconds:
                    break
            ended, after = time.monotonic(), counters()
            self.stop.set()
            for future in running:
                future.result()
        if started < self.agents:
            raise RuntimeError(f"{started} of {self.agents} agents had an answer after {ramp:.0f} s; give more --ramp")
        counted = [s for s in self.answered if not s.first and measured <= s.ended <= ended]
        seconds = ended - measured
        # Older rows lack `tiers_s`; their counters include the ramp-up.
        tiers = {"tiers": {k: [before[k], v] for k, v in after.items() if k in before}, "tiers_s": seconds}
        return {"ramp_s": measured - began, "measured_s": seconds, **summary(counted, seconds), **tiers}

    def run_agent(self, agent: int) -> None:
        rng, first = random.Random(f"{self.seed} {agent}"), True
        try:
            for number in itertools.count(agent, self.agents):
                session, began, pauses = self.sessions[number % len(self.sessions)], None, 0.0
                skipped = rng.randrange(len(session.steps)) if first else 0
                for i, (step, prompt) in enumerate(prompts(session, f"{self.seed} {number}")):
                    if i == 0 and self.are_new(prompt[: session.tools]):
                        step = replace(step, shared=0)
                    if i < skipped:
                        continue
                    if not first and self.stop.wait(step.pause):
                        return
                    if began is None:
                        began = time.monotonic()
                    else:
                        pauses += step.pause
                    answer = self.server.complete(prompt, step.answer, self.hints(session.steps, i))
                    last = i == len(session.steps) - 1
                    self.record(answer, step, first, Job(time.monotonic() - began, pauses) if last else None)
                    first = False
                    if self.stop.is_set():
                        return
        except BaseException:
            self.stop.set()
            self.ramped_up.set()
            raise

    def are_new(self, tools: list[int]) -> bool:
        """Whether no earlier session had these tool tokens; adds them to the known ones."""
        with self.lock:
            new = tuple(tools) not in self.known_tools
            self.known_tools.add(tuple(tools))
        return new

    def record(self, answer: Answer, step: Step, first: bool, job: Job | None) -> None:
        with self.lock:
            self.answered.append(AnsweredPrompt(answer, step.prompt, step.shared, time.monotonic(), first, job))
            self.started += first
            if self.started == self.agents:
                self.ramped_up.set()


def summary(answered: Sequence[AnsweredPrompt], seconds: float) -> dict[str, Any]:
    """Rates, latencies and shares of prompt tokens. A share is None if the server does not report cached tokens."""
    if not answered:
        raise RuntimeError(f"no answer ended within {seconds:.0f} s; give more --seconds")
    first = [s.answer.first_token for s in answered]
    rest = [(s.answer.seconds - s.answer.first_token) / (s.answer.tokens - 1) for s in answered if s.answer.tokens > 1]
    known = [s for s in answered if s.answer.cached is not None and s.answer.prompt]
    total = sum(s.answer.prompt for s in known)
    # SGLang also counts the tokens that a retracted request hits when it resumes, so the sum may exceed the prompt.
    cached = sum(min(s.answer.cached, s.answer.prompt) for s in known)
    out: dict[str, Any] = {"answers": len(answered), "answers_h": 3600 * len(answered) / seconds}
    jobs = [s.job for s in answered if s.job is not None]
    out["sessions_h"] = 3600 * len(jobs) / seconds
    out["from_cache"] = cached / total if known else None
    recomputed = sum(max(0, min(s.shared, s.prompt - 1) - s.answer.cached) for s in known)
    out["computed_again"] = recomputed / total if known else None
    spans = {"first_token_s": first, "output_token_s": rest or [0.0]}
    if jobs:
        spans["job_s"] = [job.seconds for job in jobs]
        out["job_share_paused"] = sum(job.pauses for job in jobs) / sum(spans["job_s"])
    for name, values in spans.items():
        out |= {f"{name}_p{round(100 * q)}": percentile(values, q) for q in (0.5, 0.9, 0.99)}
    return out


# ---- results


def earlier_rows(args: argparse.Namespace) -> dict[str, Any]:
    """Rows of the result file with `--append`, else none. Concurrent runs may add rows."""
    path = RESULTS / f"{args.name}.json"
    return json.loads(path.read_text())["numbers"] if args.append and path.exists() else {}


def settings_of(args: argparse.Namespace, sessions: Sequence[Session]) -> dict[str, Any]:
    """Settings that all rows of a result file must share."""
    fields = ("tokens", "host_gb", "seconds", "time_scale", "length_scale", "longest", "pause")
    settings = {k: getattr(args, k) for k in fields} | {"workload": args.workload}
    settings |= {k: getattr(args, k) for k in dialogues.OPTIONS} if args.workload == BFCL else {}
    settings |= {"sessions": len(sessions), "endless": traces.endless_share(sessions)}
    # Files of recorded traces may lack the key `workload`.
    earlier = {"workload": TRACES} | earlier_rows(args).get("settings", settings)
    if earlier != settings:
        raise SystemExit(f"error: {args.name}.json has rows with other settings; use those, or give another --name")
    return settings


def measure(
    args: argparse.Namespace, url: str, sessions: Sequence[Session], flags: Sequence[str] = (),
    hints: Hints = lambda *step: {},
) -> None:
    model = requests.get(f"{url}/v1/models", timeout=60).json()["data"][0]["id"]
    settings = settings_of(args, sessions)
    new_rows: dict[str, Any] = {}
    for agents in map(int, args.curve.split(",")):
        name = f"{args.server}.a{agents}"
        if name in earlier_rows(args):
            continue
        replay = Replay(Completions(url, model, args.text), sessions, agents, seed=agents, hints=hints)
        row = replay.run(args.seconds, args.ramp, counters=partial(tier_counters, url))
        new_rows[name] = row | {"options": list(flags), "command": common.command_line()}
        shown = {k: v for k, v in row.items() if k not in ("tiers", "tiers_s", "ramp_s")}
        print(name, " ".join(f"{k} {v:.4g}" for k, v in shown.items() if v is not None), flush=True)
        numbers = earlier_rows(args) | new_rows | {"settings": settings}
        numbers["most_agents"] = most_agents(numbers)
        scored = scores(numbers, settings["endless"], SCORE_PREFIXES[args.workload])
        common.write_result(args.name, numbers, scores=scored, quiet=True)
        if args.until_missed and not meets_targets(row):
            break


def plot(name: str, title: str) -> None:
    """Plot p90 time to first token over the number of agents, one curve per server without added options. Points that
    miss a target are hollow."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    record = json.loads((RESULTS / f"{name}.json").read_text())
    figure, axis = pyplot.subplots(figsize=(6.5, 4))
    for server, rows in points(record["numbers"]).items():
        if "+" in server:
            continue
        agents, first_token = [n for n, _ in rows], [row["first_token_s_p90"] for _, row in rows]
        (line,) = axis.plot(agents, first_token, "o-", label=LABELS.get(server, server))
        for n, row in rows:
            if not meets_targets(row):
                axis.plot(n, row["first_token_s_p90"], "o", color=line.get_color(), markerfacecolor="white")
    axis.axhline(FIRST_TOKEN_S, color="#999999", linestyle=":")
    axis.set(xlabel="agents", ylabel="time to first token, p90, s", yscale="log")
    axis.set_title(f"{title} on one {record['device']} (hollow: misses a target)", fontsize=10)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(RESULTS / f"{name}.png", dpi=130)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("traces", type=Path, nargs="?")
    p.add_argument("--workload", default=TRACES, choices=list(NAMES))
    p.add_argument("--url", help="address of a running server")
    p.add_argument("--arm", help="servers to start one by one, separated by commas, such as kvc or kvc+share-0.5")
    p.add_argument("--list-arms", action="store_true", help="print the name and command of each server and exit")
    p.add_argument("--plot", action="store_true", help="plot the result file and exit")
    p.add_argument("--server", default="", help="result name of the server at --url; default: `server`")
    p.add_argument("--model", help="for --arm and for the tokenizer of bfcl; default: the demo model")
    p.add_argument("--load-format", default="auto")
    p.add_argument("--server-args", default="", help="more options for every arm")
    p.add_argument("--tokens", type=int, default=420_000, help="KV memory of every arm, in bf16 tokens")
    p.add_argument("--host-gb", type=int, default=64, help="host memory of arms with a host tier, in GB")
    p.add_argument("--disk", help="empty folder for the arm kvc_disk, which is kvc_tiers with a disk tier")
    p.add_argument("--curve", default="16,24,32,48,64", help="numbers of agents, separated by commas")
    p.add_argument("--seconds", type=float, default=600, help="measured time of each point")
    p.add_argument("--ramp", type=float, default=600, help="maximum seconds until every agent has had an answer")
    p.add_argument("--time-scale", type=float, default=1.0, help="factor for the recorded pauses")
    p.add_argument("--length-scale", type=float, default=1.0, help="factor for the recorded lengths")
    p.add_argument("--longest", type=int, default=120_000, help="maximum recorded tokens of a prompt and its answer")
    p.add_argument("--pause", type=float, default=300.0, help="maximum recorded pause in seconds; longer ones are cut")
    p.add_argument("--text", action="store_true", help="send words, for servers that take no token ids")
    p.add_argument("--until-missed", action="store_true", help="end a curve at its first point that misses a target")
    p.add_argument("--append", action="store_true", help="keep the rows of the result file and add to them")
    p.add_argument("--name", help="name of the result file; default: one per GPU model")
    dialogues.add_options(p)
    args = p.parse_args(argv)
    args.name = args.name or result_name(NAMES[args.workload])
    if not (args.list_arms or args.plot):
        if (args.traces is None) == (args.workload == TRACES) or bool(args.url) == bool(args.arm):
            p.error("either TRACES or --workload bfcl, and either --url or --arm are required")
    if args.text and args.workload == BFCL:
        p.error("--text requires TRACES, because the prompts of bfcl are token ids")
    try:
        for name in filter(None, (args.arm or "").split(",")):
            arm(args, name)
    except ValueError as error:
        p.error(str(error))
    args.server = args.server or "server"
    return args


def load(args: argparse.Namespace) -> Sequence[Session]:
    if args.workload == BFCL:
        return dialogues.load(args)
    sessions = traces.load(args.traces, longest=args.longest, pause=args.pause)
    return [scaled(s, args.length_scale, args.time_scale) for s in sessions]


def main() -> None:
    args = arguments()
    if args.plot:
        return plot(args.name, TITLES[args.workload])
    if args.list_arms:
        for name, options in arms(args).items():
            model = args.model or "<folder>"
            print(f"{name}:\n  python -m sglang.launch_server --model-path {model} {' '.join(options)}")
        return None
    sessions = load(args)
    if args.url:
        return measure(args, args.url.rstrip("/"), sessions)
    for name in args.arm.split(","):
        args.server = name
        flags, options = arm(args, name)
        with common.Server([*flags, "--load-format", args.load_format], model=args.model) as server:
            hints = partial(options.hints, scale=args.time_scale)
            measure(args, server.client.url, sessions, server.args, hints)
        args.append = True  # the next arm must keep these rows
    return None


if __name__ == "__main__":
    main()
