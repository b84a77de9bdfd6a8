"""BFCL's multi-turn problems as sessions for `bench.e2e.agent_replay`, with real text and real function results.

The text comes from `bench.e2e.agents.Sessions`, without filler: a system prompt with functions, user messages, calls
and their results. Each prompt extends the previous prompt with the call from the dataset and its result, so prompts do
not depend on the server's answers. An answer has `--think` tokens more than the call, and later prompts contain only
the call.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import common, prompts
from bench.agents import traces
from bench.agents.traces import Step
from bench.e2e import agents
from bench.quality import fetch, taskdata

OPTIONS = ("join", "think", "tool_seconds")  # recorded in the result file
MARK = 8  # tokens after the system prompt that differ between replays of a session


@dataclass(frozen=True)
class Dialogue(traces.Session):
    """A session with the tokens of its prompts. `texts`: tokens that each step appends to the previous prompt. The
    first `tools` tokens are the system prompt. They count as shared in the first step, because sessions with the same
    functions share them."""

    texts: tuple[tuple[int, ...], ...]

    def prompts(self, mark: Sequence[int]) -> Iterator[tuple[Step, list[int]]]:
        """Steps and their prompts, with the `MARK` tokens of `mark` after the system prompt."""
        prompt = [*self.texts[0][: self.tools], *mark, *self.texts[0][self.tools :]]
        yield self.steps[0], prompt
        for step, text in zip(self.steps[1:], self.texts[1:]):
            prompt = [*prompt, *text]
            yield step, prompt


def load(args: argparse.Namespace) -> list[Dialogue]:
    """One session per problem. The tokenizer of `args.model` encodes the text."""
    data = taskdata.load(args.data or fetch.tasks())["agents_long"]
    options = argparse.Namespace(join=args.join, think=args.think, read=0, longest=args.longest)
    sessions = agents.Sessions(data, "", prompts.tokenizer(args.model or common.demo_model()), options)
    return [dialogue(f"dialogue {i}", sessions.session(i), args) for i in range(len(sessions.dialogues))]


def dialogue(name: str, session: agents.Session, args: argparse.Namespace) -> Dialogue:
    """Convert `session`. Texts and answers have `args.length_scale` of their tokens, and texts are cut at the end.
    Pauses are exponentially distributed."""

    def cut(text: tuple[int, ...]) -> tuple[int, ...]:
        return text[: max(1, round(len(text) * args.length_scale))]

    first = session.steps[0].sent
    tools = cut(first[: session.head])
    texts = [tools + cut(first[session.head :])]
    texts += [cut(before.call + step.sent) for before, step in itertools.pairwise(session.steps)]
    rng, steps, shared = random.Random(f"pauses {name}"), [], len(tools)
    lengths = itertools.accumulate(MARK * (i == 0) + len(text) for i, text in enumerate(texts))
    for step, length in zip(session.steps, lengths):
        pause = min(rng.expovariate(1 / args.tool_seconds), args.pause) if args.tool_seconds else 0.0
        answer = max(1, round(step.answer * args.length_scale))
        steps.append(Step(length, shared, answer, pause * args.time_scale))
        shared = length
    return Dialogue(name, len(tools), tuple(steps), tuple(texts))


def add_options(p: argparse.ArgumentParser) -> None:
    group = p.add_argument_group("bfcl")
    group.add_argument("--data", type=Path, help="output of `bench.quality.fetch tasks`; default: download it")
    group.add_argument("--join", type=int, default=1, help="dialogues per session")
    group.add_argument("--think", type=int, default=64, help="tokens of an answer in addition to the call")
    group.add_argument("--tool-seconds", type=float, default=2.0, help="mean seconds that a function runs")
