"""Tasks with a long context and several questions, as in requests with a shared prefix.

Contexts and questions are token ids, so that a context is an exact prefix of all of its requests.
"""

from __future__ import annotations

import copy
import random
import re
from dataclasses import dataclass
from typing import Any

# Task -> title in tables, in their order.
TITLES = {
    "niah": "8 needles",
    "kv": "dictionary",
    "niah-chat": "8 needles, chat",
    "kv-chat": "dictionary, chat",
    "fewshot": "few-shot",
    "extract": "extraction",
    "vt": "RULER variables",
    "cwe": "RULER common words",
    "multikey": "RULER keys",
    "chains": "chains of thought",
    "code": "HumanEval",
    "calls": "tool calls",
}


@dataclass(frozen=True)
class Question:
    ask: tuple[int, ...]  # tokens between the context and the answer
    answer: Any  # expected answer; text in most tasks


@dataclass(frozen=True)
class Context:
    name: str
    ids: tuple[int, ...]
    questions: tuple[Question, ...]


class Maker:
    """Creates contexts in the tokens of one model. Equal arguments give equal contexts.

    A question is followed by the beginning of its answer, which repeats the key. In a chat it is not: the prompt ends
    with what the chat template adds after the question.
    """

    chat = False

    def __init__(self, tok, essays: str):
        self.tok = tok
        self.sentences = [
            " ".join(s.split()) for s in re.split(r"(?<=[.?!])\s+", essays) if 20 < len(s) < 400
        ]
        self.words = sorted({w for w in re.findall(r"\b[a-z]{4,9}\b", essays)})
        self.text_ids = tok(essays, add_special_tokens=False).input_ids
        # Chat template before and after a user message.
        mark = "@@message@@"
        text = tok.apply_chat_template(
            [{"role": "user", "content": mark}], add_generation_prompt=True, tokenize=False
        )
        self.head, self.tail = text.split(mark)

    def ids(self, text: str) -> list[int]:
        return self.tok(text, add_special_tokens=False).input_ids

    def as_chat(self) -> Maker:
        maker = copy.copy(self)
        maker.chat = True
        return maker

    def question(self, ask: str, begin: str, answer: str) -> Question:
        return Question(tuple(self.ids(f"\n\n{ask}{self.tail}{'' if self.chat else begin}")), answer)

    def haystack(self, rng: random.Random, tokens: int) -> list[str]:
        """Consecutive sentences of the essays, with at least `tokens` tokens."""
        at = rng.randrange(len(self.sentences))
        out, n = [], 0
        while n < tokens:
            sentence = self.sentences[at % len(self.sentences)]
            out.append(sentence)
            n += len(self.ids(" " + sentence))
            at += 1
        return out

    def needles(self, number: int, tokens: int, count: int = 8) -> Context:
        """Context with `count` magic numbers hidden at random places, and one question about each."""
        rng = random.Random(f"needles {number}")
        keys = rng.sample(self.words, count)
        values = [str(rng.randrange(1000, 10000)) for _ in keys]
        hidden = [f"The special magic number for {k} is: {v}." for k, v in zip(keys, values)]
        room = tokens - len(self.ids(self.head)) - sum(len(self.ids(" " + h)) for h in hidden) - 30
        body = self.haystack(rng, room)
        for h in hidden:
            body.insert(rng.randrange(len(body) + 1), h)
        intro = "Some special magic numbers are hidden in this text. Remember them."
        text = f"{self.head}{intro}\n\n{' '.join(body)}"
        ask = "What is the special magic number for {}?"
        begin = "The special magic number for {} is:"
        questions = [self.question(ask.format(k), begin.format(k), v) for k, v in zip(keys, values)]
        return Context(f"needles-{number}", tuple(self.ids(text)), tuple(questions))

    def dictionary(self, number: int, tokens: int, count: int = 8) -> Context:
        """Context filled by a dictionary, without filler text, and questions about `count` entries."""
        rng = random.Random(f"dictionary {number}")
        words = self.words[:]
        rng.shuffle(words)
        entries: list[tuple[str, str]] = []
        n = len(self.ids(self.head)) + 20
        for word in words:
            entry = (word, str(rng.randrange(1000, 10000)))
            n += len(self.ids(f' "{entry[0]}": {entry[1]},'))
            if n > tokens:
                break
            entries.append(entry)
        body = ", ".join(f'"{k}": {v}' for k, v in entries)
        text = f"{self.head}Here is a dictionary.\n\n{{{body}}}"
        questions = [
            self.question(f'What is the value of "{k}" in the dictionary?', f'The value of "{k}" is', v)
            for k, v in rng.sample(entries, count)
        ]
        return Context(f"dictionary-{number}", tuple(self.ids(text)), tuple(questions))

    def passage(self, number: int, tokens: int) -> list[int]:
        """Passage of the essays with `tokens` tokens."""
        at = number * 8000 % (len(self.text_ids) - tokens)
        return self.text_ids[at : at + tokens]


def right(answer: str, text: str) -> bool:
    """Whether the generated text starts with the answer."""
    return text.strip().lstrip('"').startswith(answer)


def names(answer: str, text: str) -> bool:
    """Whether the generated text contains the answer, a number."""
    return re.search(rf"(?<!\d){answer}(?!\d)", text) is not None
