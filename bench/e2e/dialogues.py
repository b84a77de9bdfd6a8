"""BFCL's multi-turn problems as sessions for `bench.e2e.agent_replay`: prompts of real text with real tool outputs.

The text is that of `bench.e2e.agents.Sessions`, without filler: a system prompt with functions, user messages, calls
and the results of the calls. Each prompt is the previous one, followed by the dialogue's own call and its result, so
prompts do not depend on the server's answers. An answer has the length of the call and of a thought, which later
prompts do not contain.
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
MARK = 8  # tokens after the system prompt that distinguish one replay of a session from another


@dataclass(frozen=True)
class Dialogue(traces.Session):
    """A session with the tokens of its prompts. `texts`: for each step, the tokens that its prompt has after the
    previous prompt. The first `tools` tokens, the system prompt, also count as shared in the first step: sessions with
    the same functions begin with them."""

    texts: tuple[tuple[int, ...], ...]

    def prompts(self, mark: Sequence[int]) -> Iterator[tuple[Step, list[int]]]:
        """Steps and their prompts, with the `MARK` tokens of `mark` after the system prompt."""
        prompt = [*self.texts[0][: self.tools], *mark, *self.texts[0][self.tools :]]
        yield self.steps[0], prompt
        for step, text in zip(self.steps[1:], self.texts[1:]):
            prompt = [*prompt, *text]
            yield step, prompt


def load(args: argparse.Namespace) -> list[Dialogue]:
    """One session for each problem, with the tokenizer of `args.model`."""
    data = taskdata.load(args.data or fetch.tasks())["agents_long"]
    options = argparse.Namespace(join=args.join, think=args.think, read=0, longest=args.longest)
    sessions = agents.Sessions(data, "", prompts.tokenizer(args.model or common.demo_model()), options)
    return [dialogue(f"dialogue {i}", sessions.session(i), args) for i in range(len(sessions.dialogues))]


def dialogue(name: str, session: agents.Session, args: argparse.Namespace) -> Dialogue:
    """`session` with `args.length_scale` of each text, cut at its end. Pauses are exponentially distributed."""

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
    group.add_argument("--data", type=Path, help="file of `bench.quality.fetch tasks`; default: a new one")
    group.add_argument("--join", type=int, default=1, help="dialogues per session")
    group.add_argument("--think", type=int, default=64, help="tokens of an answer in addition to the call")
    group.add_argument("--tool-seconds", type=float, default=2.0, help="mean run time of a function")
