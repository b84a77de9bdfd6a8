"""Chains of thought: the drawn problems are consistent, whatever the sentences of the examples are."""

from __future__ import annotations

import random
import re

import pytest
import yaml

from bench.quality import chains
from bench.quality.tasks import Maker
from sglang_kvc.demo.model import cache_dir
from tests.bench.test_tasks import Words, text

FILE = cache_dir() / "gsm8k-cot.yaml"
# Stand-ins for the sentences of lm-eval, with the numbers of `RULES`.
SAMPLES = [
    ("15 nails, later 21. How many are new?", "21 - 15 = 6. The answer is 6."),
    ("3 cups and 2 more. How many?", "3 + 2 = 5. The answer is 5."),
    ("Al has 32 pens, Bo 42. They lose 35. How many are left?", "32 + 42 = 74. 74 - 35 = 39. The answer is 39."),
    ("20 mugs, later 12. How many broke?", "20 - 12 = 8. The answer is 8."),
    ("Five hats and two each from 2 aunts. How many?", "2 each is 4 more. 5 + 4 = 9. The answer is 9."),
    ("Nine lamps, five more on each of 4 days. How many?", "5 * 4 = 20. 9 + 20 is 29. The answer is 29."),
    ("58 keys, 23 lost, then 2. How many are left?", "58 - 23 = 35. 35 - 2 = 33. The answer is 33."),
    ("$23 for five rolls at $3. What is left?", "5 x 3 = 15. 23 - 15 is 8. The answer is 8."),
]


@pytest.fixture(params=["stand-ins", pytest.param("lm-eval", marks=pytest.mark.skipif(
    not FILE.exists(), reason="needs: python -m bench.quality.fetch gsm8k"))])  # fmt: skip
def file(request, tmp_path):
    if request.param == "lm-eval":
        return FILE
    path = tmp_path / "samples.yaml"
    samples = [{"question": question, "target": target} for question, target in SAMPLES]
    path.write_text(yaml.safe_dump({"fewshot_config": {"samples": samples}}))
    return path


def equations(text: str) -> list[bool]:
    """Whether each equation of a chain holds."""
    found = re.findall(r"(\d+) ([-+*x]) (\d+) (?:=|is) (\d+)", text)
    value = {"-": int.__sub__, "+": int.__add__, "*": int.__mul__, "x": int.__mul__}
    return [value[sign](int(a), int(b)) == int(c) for a, sign, b, c in found]


@pytest.mark.parametrize("kind", range(len(chains.RULES)))
def test_drawn_problem_is_consistent(file, kind):
    example, asked = chains.examples(file)[kind], set()
    for seed in range(50):
        question, chain, answer = chains.problem(example, chains.RULES[kind], random.Random(seed))
        holds = equations(chain)
        assert holds and all(holds) and answer >= 0
        assert chains.concludes(answer, chain) and not chains.concludes(answer + 1, chain)
        asked.add(question)
    assert len(asked) > 30


def test_original_numbers_give_original_text(file):
    for example, rule in zip(chains.examples(file), chains.RULES, strict=True):
        same = chains.Rule(rule.given, lambda rng, rule=rule: rule.given, rule.follow)
        question, chain, answer = chains.problem(example, same, random.Random(0))
        assert chain == example[1] and chains.concludes(answer, example[1])
        assert re.sub(r"\d", "", question) == re.sub(r"\d|\b(five|two|nine)\b", "", example[0], flags=re.IGNORECASE)


def test_only_first_conclusion_counts():
    assert chains.concludes(1234, " So 1,234. The answer is 1,234. The answer is 5.")
    assert not chains.concludes(5, "The answer is 1. The answer is 5.") and not chains.concludes(5, "It is 5.")


def test_context_shows_examples_and_asks_new_questions(file):
    maker = Maker(Words(), "A sentence about some words.")
    context = chains.chains(maker, file, 3, 3000)
    assert context == chains.chains(maker, file, 3, 3000) != chains.chains(maker, file, 4, 3000)
    shown = text(context.ids)
    assert 2000 < len(context.ids) <= 3000 and all(question in shown for question, _ in chains.examples(file)[:1])
    assert len(context.questions) == 8
    for question in context.questions:
        assert text(question.ask) not in shown
