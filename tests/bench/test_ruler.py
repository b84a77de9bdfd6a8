"""RULER's tasks without a model: the package's own text, split where its question begins."""

from __future__ import annotations

import random
import re
from collections import Counter
from types import SimpleNamespace

import pytest

from bench.quality import ruler, suite
from bench.quality.tasks import Maker
from sglang_kvc.demo.model import cache_dir

FOLDER = cache_dir() / "ruler"


def needs_package(test):
    """Marked slow because the first test imports the package."""
    missing = pytest.mark.skipif(not FOLDER.exists(), reason="needs: python -m bench.quality.fetch ruler")
    return pytest.mark.slow(missing(test))


class Pieces:
    """A tokenizer of words and single characters; `text` undoes it."""

    def __init__(self):
        self.known: dict[str, int] = {}

    def __call__(self, text, add_special_tokens=False):
        return SimpleNamespace(
            input_ids=[self.known.setdefault(p, len(self.known)) for p in re.findall(r"\w+|\W", text)]
        )

    def apply_chat_template(self, messages, add_generation_prompt, tokenize):
        return f"<user>{messages[0]['content']}</><assistant>"

    def text(self, ids) -> str:
        pieces = list(self.known)
        return "".join(pieces[i] for i in ids)


@pytest.fixture(scope="module")
def maker() -> Maker:
    return Maker(Pieces(), "Essays are not read here, but a sentence is.")


def example(maker, task, number=0, tokens=1500) -> tuple[str, str, tuple[str, ...]]:
    context = ruler.context(maker, FOLDER, task, number, tokens)
    (question,) = context.questions
    assert 0.8 * tokens < len(context.ids) <= tokens
    return maker.tok.text(context.ids), maker.tok.text(question.ask), question.answer


@needs_package
@pytest.mark.parametrize("task", ruler.TASKS)
def test_context_follows_its_number_and_leaves_global_random_state(maker, task):
    ruler.generators(FOLDER)  # its imports may draw from the global generator
    random.seed(7)
    before = random.getstate()
    context = ruler.context(maker, FOLDER, task, 0, 1500)
    assert random.getstate() == before
    ruler.context(maker, FOLDER, "cwe", 5, 1100)
    assert context == ruler.context(maker, FOLDER, task, 0, 1500) != ruler.context(maker, FOLDER, task, 1, 1500)


@needs_package
@pytest.mark.parametrize("number", range(3))
def test_variable_tracking_wants_variables_of_chain(maker, number):
    text, ask, wanted = example(maker, "vt", number)
    value = re.search(r"assigned the value (\d+) in", ask)[1]
    assert ask.endswith("they are:") and len(wanted) == 5
    chain = {value}
    for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text):
        if source in chain:
            chain.add(name)
    assert chain == {value, *wanted}


@needs_package
@pytest.mark.parametrize("number", range(3))
def test_word_extraction_wants_ten_most_common_words(maker, number):
    text, ask, wanted = example(maker, "cwe", number)
    assert "10 most common words" in ask and "Question" not in text
    counts = Counter(word for _, word in re.findall(r"(\d+)\. ([\w\- ]+?)(?= \d+\.|$)", text.split("\n")[1]))
    assert {word for word, _ in counts.most_common(10)} == set(wanted) and min(counts[w] for w in wanted) > 1


@needs_package
@pytest.mark.parametrize("number", range(3))
def test_multikey_task_asks_for_one_key(maker, number):
    text, ask, (wanted,) = example(maker, "multikey", number)
    needles = dict(re.findall(r"magic uuids for (\S+) is: (\S+)\.", text))
    assert len(needles) > 10 and needles[re.search(r"uuid for (\S+) mentioned", ask)[1]] == wanted


def test_answer_is_scored_by_items_it_names():
    wanted = tuple("abcdefghij")
    assert ruler.share_named(wanted, "A, b and C") == pytest.approx(0.4)  # the d of "and"
    assert ruler.names_most(wanted, "a b c d e f g") and not ruler.names_most(wanted, "a b c d e f")
    assert ruler.names_all(("x1", "y2"), "Y2, x1") and not ruler.names_all(("x1", "y2"), "x1")


def test_too_short_context_is_rejected():
    with pytest.raises(ValueError, match="give --length 1000 or more"):
        ruler.context(None, FOLDER, "vt", 0, 999)


def described(maker, folder, task, number, tokens):
    """Replaces `ruler.context`; other processes find it by its name."""
    return task, number, tokens


def test_contexts_are_eight_times_as_many_with_one_question_each(monkeypatch):
    monkeypatch.setattr(suite.fetch, "ruler", lambda: FOLDER)
    monkeypatch.setattr(suite.ruler, "context", described)
    args = SimpleNamespace(first=2, contexts=3, length=512)
    assert suite.TASKS["vt"].make(None, args) == [("vt", n, 512) for n in range(16, 40)]
