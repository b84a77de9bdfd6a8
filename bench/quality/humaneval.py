"""HumanEval with a context of solved problems: the prefix is existing code, the question a function to write.

Problems are divided into groups, and a context has solved problems of other groups only, so a problem never occurs in
its own context. An answer is right if its tests pass.
"""

from __future__ import annotations

import random

from bench.quality.sandbox import succeeds
from bench.quality.tasks import Context, Maker, Question

GROUPS = 4
# Unindented lines end the function.
STOP = ("\ndef ", "\nclass ", "\nfrom ", "\nimport ", "\nif ", "\nprint(", "\nassert ", "\n#", "\n@", "\n```", "\n'''")


def solved(maker: Maker, problems: list[dict], number: int, tokens: int) -> list[Context]:
    """Contexts of up to `tokens` tokens, with `number` evenly spaced problems as questions."""
    selected = [problems[i * len(problems) // number] for i in range(min(number, len(problems)))]
    groups = [selected[g::GROUPS] for g in range(GROUPS) if selected[g::GROUPS]]
    out = []
    for g, group in enumerate(groups):
        others = [p for p in problems if p not in group]
        random.Random(f"solved {g}").shuffle(others)
        ids: list[int] = []
        for p in others:
            piece = maker.ids(f"{p['prompt']}{p['canonical_solution'].rstrip()}\n\n\n")
            if len(ids) + len(piece) <= tokens:
                ids += piece
        questions = tuple(Question(tuple(maker.ids(p["prompt"])), p) for p in group)
        out.append(Context(f"solved-{g}", tuple(ids), questions))
    return out


def passes(problem: dict, text: str) -> bool:
    """Whether the problem's tests pass with `text` as the body of its function."""
    for stop in STOP:
        text = text.split(stop)[0]
    check = f"check({problem['entry_point']})"
    return succeeds(f"{problem['prompt']}{text}\n\n{problem['test']}\n\n{check}\n")
