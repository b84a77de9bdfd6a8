"""Recorded sessions of coding agents: token counts of prompts and answers, and pauses.

The file is gzipped JSON, `{"meta": .., "sessions": [{"id", "tools", "system", "steps"}, ..]}`. A step is a list of five
numbers: input tokens, tokens shared with the previous prompt (a multiple of 64), output tokens, seconds between the
last answer and this prompt, and seconds until the answer. It has no text. The file derives from
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
    """A prompt and its answer, in tokens. `shared`: number of first tokens that equal those of the previous prompt.
    `pause`: seconds between the last answer and this prompt."""

    prompt: int
    shared: int
    answer: int
    pause: float


@dataclass(frozen=True)
class Session:
    """Steps of a session. `tools`: number of first tokens that describe tools. Equal numbers mean equal tools."""

    name: str
    tools: int
    steps: tuple[Step, ...]

    @property
    def longest(self) -> int:
        return max(step.prompt + step.answer for step in self.steps)


def load(path: Path, *, longest: int, pause: float, split: str | None = None) -> list[Session]:
    """Load the sessions in which each prompt and its answer have at most `longest` tokens. Longer pauses are cut to
    `pause` seconds. `split`: one of two disjoint halves."""
    with gzip.open(path, "rt") as file:
        recorded = json.load(file)["sessions"]
    sessions = [_session(s, pause) for s in sorted(recorded, key=lambda s: s["id"])]
    sessions = [s for s in sessions if len(s.steps) > 1 and s.longest <= longest]
    random.Random(0).shuffle(sessions)
    return sessions if split is None else sessions[SPLITS.index(split) :: 2]


def _session(record: dict, pause: float) -> Session:
    steps, previous = [], 0
    for prompt, shared, answer, recorded_pause, _ in record["steps"]:
        steps.append(Step(prompt, min(shared, previous, prompt), max(answer, 1), min(float(recorded_pause), pause)))
        previous = prompt
    return Session(record["id"], min(record["tools"], *(s.prompt for s in steps)), tuple(steps))


def endless_share(sessions: Sequence[Session]) -> float:
    """Hit rate of a cache that never evicts: the share of prompt tokens that are shared with the previous prompt."""
    steps = [step for s in sessions for step in s.steps]
    return sum(s.shared for s in steps) / sum(s.prompt for s in steps)
