"""Chains of thought: word problems like GSM8K's, after worked examples.

The sentences come from the eight examples of lm-eval's GSM8K task (`python -m bench.quality.fetch gsm8k`). Each example
is a template: a rule draws its numbers and computes the others. The context has worked examples up to its length. Each
of its eight questions has new numbers. An answer must end with the right number, and its intermediate steps are free.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.quality.tasks import Context, Maker, Question

WORDS = {"two": 2, "three": 3, "five": 5, "nine": 9}
NUMBER = re.compile(rf"\d+|\b(?:{'|'.join(WORDS)})\b", re.IGNORECASE)
ANSWER = re.compile(r"The answer is \$?(-?[\d,]+)")
STOP = ("\n\n", "\nQ:")


@dataclass(frozen=True)
class Rule:
    """Numbers of one example. given: those of its question. drawn: others in their place. follow: number of its chain
    -> function of the drawn numbers; the last one is the answer. Other numbers stay."""

    given: tuple[int, ...]
    drawn: Callable[[random.Random], tuple[int, ...]]
    follow: dict[int, Callable[..., int]]


def _more(rng: random.Random, base: int) -> int:
    return base + rng.randint(3, 30)


def _bagels(rng: random.Random) -> tuple[int, ...]:
    count, price = rng.randint(2, 9), rng.randint(2, 9)
    return _more(rng, count * price), count, price


def _lost(rng: random.Random) -> tuple[int, ...]:
    first, second = rng.randint(5, 30), rng.randint(2, 9)
    return _more(rng, first + second), first, second


def _eaten(rng: random.Random) -> tuple[int, ...]:
    one, other = rng.randint(20, 60), rng.randint(20, 60)
    return one, other, rng.randint(10, one + other - 5)


def _grown(rng: random.Random) -> tuple[int, ...]:
    before = rng.randint(5, 60)
    return before, _more(rng, before)


# In the order of the examples: trees, cars, chocolates, lollipops, toys, computers, golf balls, bagels.
RULES = (
    Rule((15, 21), _grown, {6: lambda a, b: b - a}),
    Rule((3, 2), lambda rng: (rng.randint(2, 40), rng.randint(2, 40)), {5: lambda a, b: a + b}),
    Rule((32, 42, 35), _eaten, {74: lambda a, b, c: a + b, 39: lambda a, b, c: a + b - c}),
    Rule((20, 12), lambda rng: _grown(rng)[::-1], {8: lambda a, b: a - b}),
    Rule((5, 2), lambda rng: (rng.randint(3, 20), rng.randint(2, 9)),
         {4: lambda a, b: 2 * b, 9: lambda a, b: a + 2 * b}),
    Rule((9, 5), lambda rng: (rng.randint(5, 20), rng.randint(2, 12)),
         {20: lambda a, b: 4 * b, 29: lambda a, b: a + 4 * b}),
    Rule((58, 23, 2), _lost, {35: lambda a, b, c: a - b, 33: lambda a, b, c: a - b - c}),
    Rule((23, 5, 3), _bagels, {15: lambda a, b, c: b * c, 8: lambda a, b, c: a - b * c}),
)  # fmt: skip


def examples(file: Path) -> list[tuple[str, str]]:
    """Questions and chains of lm-eval's task, as `RULES` expect them."""
    import yaml

    samples = yaml.safe_load(file.read_text())["fewshot_config"]["samples"]
    if len(samples) != len(RULES):
        raise ValueError(f"{file} has {len(samples)} examples instead of {len(RULES)}")
    return [(sample["question"], sample["target"]) for sample in samples]


def problem(example: tuple[str, str], rule: Rule, rng: random.Random) -> tuple[str, str, int]:
    """Question, chain and answer of an example with other numbers."""
    drawn = rule.drawn(rng)
    values = dict(zip(rule.given, drawn, strict=True))
    values |= {number: of(*drawn) for number, of in rule.follow.items()}

    def replaced(text: str) -> str:
        def other(match: re.Match) -> str:
            number = WORDS.get(match[0].lower()) or int(match[0])
            return str(values[number]) if number in values else match[0]

        return NUMBER.sub(other, text)

    return replaced(example[0]), replaced(example[1]), values[[*rule.follow][-1]]


def chains(maker: Maker, file: Path, number: int, tokens: int) -> Context:
    """Context of at most `tokens` tokens with eight questions. It has plain text and no dialogue, as in lm-eval."""
    rng, shown = random.Random(f"chains {number}"), examples(file)
    questions = [problem(example, rule, rng) for example, rule in zip(shown, RULES, strict=True)]
    ids: list[int] = []
    solved = list(shown)
    while True:
        rng.shuffle(solved)
        for question, chain in solved:
            piece = maker.ids(f"Q: {question}\nA: {chain}\n\n")
            if len(ids) + len(piece) > tokens:
                asks = (Question(tuple(maker.ids(f"Q: {ask}\nA:")), answer) for ask, _, answer in questions)
                return Context(f"chains-{number}", tuple(ids), tuple(asks))
            ids += piece
        solved = [problem(example, rule, rng)[:2] for example, rule in zip(shown, RULES, strict=True)]


def concludes(answer: int, text: str) -> bool:
    """Whether the first conclusion of a generated chain is the answer."""
    match = ANSWER.search(text)
    return match is not None and match[1].replace(",", "") == str(answer)
