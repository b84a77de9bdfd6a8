"""Recorded sessions of coding agents: the sizes of their prompts and answers, and the pauses between them.

The file is gzipped JSON, `{"meta": .., "sessions": [{"id", "tools", "system", "steps"}, ..]}`. A step is a list of five
numbers: input tokens, tokens shared with the previous prompt (a multiple of 64), output tokens, seconds between the
last answer and this prompt, and seconds until the answer. No text is recorded. It was made from
github.com/callanjfox/kv-cache-tester (Apache-2.0) and is not part of this repository.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SPLITS = ("tune", "report")


@dataclass(frozen=True)
class Step:
    """One prompt and its answer, in tokens. `shared`: number of first tokens of `prompt` that are those of the previous
    prompt.
    `pause`: seconds from the end of the last answer to the arrival of this prompt."""

    prompt: int
    shared: int
    answer: int
    pause: float


@dataclass(frozen=True)
class Session:
    """`tools`: number of first tokens, which describe tools. Sessions with equal numbers have the same tools."""

    name: str
    tools: int
    steps: tuple[Step, ...]

    @property
    def longest(self) -> int:
        return max(step.prompt + step.answer for step in self.steps)


def load(path: Path, *, longest: int, pause: float, split: str | None = None) -> list[Session]:
    """Sessions whose prompts with their answers have at most `longest` tokens; longer pauses are cut to `pause`
    seconds. `split`: one of two disjoint halves."""
    with gzip.open(path, "rt") as file:
        recorded = json.load(file)["sessions"]
    some = [_session(s, pause) for s in sorted(recorded, key=lambda s: s["id"])]
    some = [s for s in some if len(s.steps) > 1 and s.longest <= longest]
    random.Random(0).shuffle(some)
    return some if split is None else some[SPLITS.index(split) :: 2]


def _session(record: dict, pause: float) -> Session:
    steps, before = [], 0
    for prompt, shared, answer, think, _ in record["steps"]:
        steps.append(Step(prompt, min(shared, before, prompt), max(answer, 1), min(float(think), pause)))
        before = prompt
    return Session(record["id"], min(record["tools"], *(s.prompt for s in steps)), tuple(steps))


def endless_share(sessions: Sequence[Session]) -> float:
    """Share of all prompt tokens that were in the previous prompt: the hit rate of a cache that never evicts."""
    steps = [step for s in sessions for step in s.steps]
    return sum(s.shared for s in steps) / sum(s.prompt for s in steps)
