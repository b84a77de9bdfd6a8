"""Agents in a closed loop, on servers with equal KV memory: what is answered from the cache, and how long a step takes.

    python -m bench.e2e.agents --model <folder> --load-format dummy       # on a GPU: stock bf16 and fp8, ours
    python -m bench.e2e.agents --agents 4,16 --join 1 --read 60 --think 8 --tokens 10000    # CPU engine, a tiny model
    ... --only bf16 --append     # adds to the result file; calls on several GPUs at a time may share one
    ... --data FILE     # of `python -m bench.quality.fetch tasks`, where there is no network

A session is a dialogue of BFCL's multi-turn problems: a system prompt with its functions, which sessions share, then
what a user asks for and what functions return. Each step sends the whole history, gets an answer as long as the
dialogue's call and a thought of `--think` tokens, and keeps what the model really said. A result brings about `--read`
tokens of text along (files and pages that agents read; from a quarter of it to twice as much), and takes `--pause`
seconds, in which the session's blocks are nobody's. For each number in `--agents`, so many sessions run at a time, and
`--each` times as many in all. Random weights do: what counts are lengths.
"""

from __future__ import annotations

import argparse
import itertools
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from bench import common, prompts
from bench.client import Client
from bench.compare import percentile
from bench.e2e import serving, small
from bench.quality import fetch, taskdata
from bench.quality.calls import INTRO, RESULT, described

NAME, SEED = "e2e/agents", 3


@dataclass(frozen=True)
class Step:
    sent: tuple[int, ...]  # tokens behind the history
    answer: int  # tokens


@dataclass(frozen=True)
class Session:
    functions: tuple[str, ...]
    head: int  # first tokens, which sessions with the same functions share
    steps: tuple[Step, ...]


@dataclass
class Seen:
    """One answered step."""

    prompt: int
    cached: int
    repeated: int  # prompt tokens that were sent or said before: what an endless cache would have
    answer: int
    seconds: float


@dataclass
class Heads:
    """System prompts that some session has sent."""

    known: set[tuple[str, ...]] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def first(self, functions: tuple[str, ...]) -> bool:
        with self.lock:
            new = functions not in self.known
            self.known.add(functions)
            return new


def template(tok) -> tuple[str, str, str, str]:
    """What the chat template writes around messages: before the system prompt, between it and a user's first message,
    between an answer and a user's next one, and between that and the next answer."""
    marks = ["@@system@@", "@@first@@", "@@answer@@", "@@next@@"]
    roles = ["system", "user", "assistant", "user"]
    messages = [{"role": r, "content": m} for r, m in zip(roles, marks)]
    text = tok.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    parts = []
    for mark in marks:
        part, text = text.split(mark)
        parts.append(part)
    return parts[0], parts[1], parts[3], text


def sessions(data: dict, essays: str, tok, a: argparse.Namespace) -> list[Session]:
    """`a.join` dialogues with the same functions in each; the same arguments, the same sessions."""

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tok(text, add_special_tokens=False).input_ids)

    begin, first, after, answer = template(tok)
    draw, pages, at = random.Random(SEED), ids(essays), 0
    groups: dict[tuple[str, ...], list[dict]] = {}
    for trace in data["traces"]:
        groups.setdefault(tuple(trace["classes"]), []).append(trace)
    dialogues = [(names, trace) for names, some in groups.items() for trace in some]
    draw.shuffle(dialogues)
    out = []
    for names, trace in itertools.islice(itertools.cycle(dialogues), a.each * max(a.agents)):
        known = {f["name"]: f for n in names for f in data["functions"][n]}
        head = sent = ids(f"{begin}{INTRO}\n\n" + "\n".join(described(f) for f in known.values()) + first)
        steps: list[Step] = []
        for turn in [t for d in [trace, *draw.choices(groups[names], k=a.join - 1)] for t in d["turns"]]:
            sent += ids(turn["user"] + answer)
            for call, result in turn["calls"]:
                steps.append(Step(sent, a.think + len(ids(call)) + 1))
                length = int(a.read * 2 ** draw.uniform(-2, 1))
                sent = ids(f"{after}{RESULT}{result}\n")
                sent += tuple(pages[(at + i) % len(pages)] for i in range(length)) + ids(answer)
                at += length
            steps.append(Step(sent, a.think + 2))
            sent = ids(after)
        out.append(Session(names, len(head), tuple(steps)))
    return out


def live(client: Client, session: Session, heads: Heads, pause: float) -> list[Seen]:
    """One session from its first step to its last."""
    history: list[int] = []
    out = []
    known = 0 if heads.first(session.functions) else session.head
    for step in session.steps:
        history += step.sent
        began = time.monotonic()
        answer = client.generate(history, step.answer)
        seconds = time.monotonic() - began
        out.append(Seen(len(history), answer.cached_tokens, known, len(answer.ids), seconds))
        history += answer.ids
        known = len(history)
        time.sleep(pause)
    return out


def measure(client: Client, todo: list[Session], agents: int, pause: float) -> dict:
    """All of `todo`, `agents` at a time, from an empty cache."""
    client.flush()
    heads, began = Heads(), time.monotonic()
    with ThreadPoolExecutor(agents) as pool:
        seen = [s for steps in pool.map(lambda session: live(client, session, heads, pause), todo) for s in steps]
    seconds = time.monotonic() - began
    taken = [s.seconds for s in seen]
    prompt, cached = sum(s.prompt for s in seen), sum(s.cached for s in seen)
    return {
        "steps": len(seen),
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "computed_tokens": prompt - cached,
        "output_tokens": sum(s.answer for s in seen),
        "from_cache": cached / prompt,
        "endless_cache": sum(s.repeated for s in seen) / prompt,
        "duration_s": round(seconds, 2),
        "steps_s": len(seen) / seconds,
        "step_s_mean": sum(taken) / len(taken),
        "step_s_median": percentile(taken, 0.5),
        "step_s_p99": percentile(taken, 0.99),
    }


def servers(a: argparse.Namespace) -> dict[str, list[str]]:
    """name -> options; all with the memory of `a.tokens` bf16 tokens."""
    if common.has_gpu():
        a.server_args += f" --cuda-graph-max-bs-decode {max(a.agents)}"
    return small.servers(a, "--chunked-prefill-size", "512")


def scores(numbers: dict[str, dict], a: argparse.Namespace) -> dict[str, tuple[float, str]]:
    """Steps a second over stock's, and what comes from the cache; of the first format and the most agents. None where
    servers capture no prefills, which is not their default."""
    if a.no_prefill_graphs:
        return {}
    mine, most = f"kvc_{a.formats.split(',')[0]}", max(a.agents)
    head = "e2e.agents" if common.has_gpu() else "serve.agents"
    found = {n: numbers[f"{n}.a{most}"] for n in ("bf16", "fp8", mine) if f"{n}.a{most}" in numbers}
    unit = f"share of prompt tokens, {most} agents"
    out = {f"{head}.from_cache.{n}": (row["from_cache"], unit) for n, row in found.items()}
    if mine in found:
        ratio = {n: found[mine]["steps_s"] / row["steps_s"] for n, row in found.items() if n != mine}
        out |= {f"{head}.vs_{n}": (x, f"x steps/s, {most} agents") for n, x in ratio.items()}
    return out


def table(numbers: dict[str, dict]) -> str:
    columns = [c for c in next(iter(numbers.values())) if c not in ("options", "command")]
    lines = [f"{'server.agents':16}" + "".join(f"{c:>16}" for c in columns)]
    lines += [f"{n:16}" + "".join(f"{row[c]:16.4g}" for c in columns) for n, row in numbers.items()]
    return "\n".join(lines)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--agents", default="16,64", help="sessions at a time")
    p.add_argument("--each", type=int, default=2, help="sessions of an agent")
    p.add_argument("--join", type=int, default=2, help="dialogues in a session")
    p.add_argument("--think", type=int, default=64, help="tokens of an answer besides the call")
    p.add_argument("--read", type=int, default=600, help="tokens of text that a result brings along, about")
    p.add_argument("--pause", type=float, default=2.0, help="seconds between an answer and the next step")
    p.add_argument("--append", action="store_true", help="keep what the result file holds of other servers")
    p.add_argument("--data", type=Path, help="file of `bench.quality.fetch tasks`; default: made anew")
    p.add_argument("--name", default=NAME)
    a = small.arguments(p, argv, tokens=120_000, only="")
    a.agents = [int(n) for n in a.agents.split(",")]
    return a


def main() -> None:
    a = arguments()
    a.model = small.model(a)
    data = taskdata.load(a.data or fetch.tasks())
    todo = sessions(data["agents"], data["essays"], prompts.tokenizer(a.model), a)
    longest = max(sum(len(s.sent) + s.answer for s in session.steps) for session in todo)
    print(f"{len(todo)} sessions, {sum(len(s.steps) for s in todo)} steps, up to {longest} tokens", flush=True)
    numbers = serving.earlier(a)
    for name, options in servers(a).items():
        with common.Server(options, model=a.model) as server:
            measure(server.client, todo[:4], 4, 0.0)  # compile and warm up
            for agents in a.agents:
                before = server.log.read_text(errors="replace").count("Retract requests")
                row = measure(server.client, todo[: a.each * agents], agents, a.pause)
                after = server.log.read_text(errors="replace").count("Retract requests")
                numbers |= serving.earlier(a)  # another GPU's call may have added to it
                row |= {"retractions": after - before, "options": options, "command": common.command_line()}
                numbers |= {"longest": longest, f"{name}.a{agents}": row}
                common.write_result(a.name, numbers, scores=scores(numbers, a), quiet=True)
            assert not server.errors(), server.errors()
    print(table({name: row for name, row in numbers.items() if name != "longest"}))


if __name__ == "__main__":
    main()
