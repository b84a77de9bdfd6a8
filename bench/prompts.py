"""Prompts from text that every machine has: questions, dialogues, shared prefixes, long prose and code.

All text comes from the Python standard library: the language reference in `pydoc_data.topics`, and source code. Prompts
therefore depend on the version of Python; results record their `digest`.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

# Chapters of the reference with several thousand words. Each is used by one family of prompts.
CHAPTERS = ("compound", "assignment", "formatstrings", "types", "execmodel", "attribute-access", "debugger")
MODULES = "textwrap heapq bisect shlex queue sched string fnmatch glob statistics csv cmd".split()

QUESTIONS = (
    "What is the capital of France, and on which river does it lie?",
    "Write a Python function that reverses the words of a sentence but not their letters.",
    "A train leaves at 9:40 and arrives at 13:05. How long does the journey take?",
    "Explain in two sentences why the sky is blue.",
    "List five animals that live in the sea and one fact about each.",
    "Translate into French: 'The weather is nice today, let us go for a walk.'",
    "What is the difference between a list and a tuple in Python?",
    "Give me a short recipe for pancakes for four people.",
    "Who wrote 'Pride and Prejudice', and what is it about?",
    "Summarise how a bicycle stays upright while it moves.",
    "What are the three states of matter? Give an everyday example of each.",
    "Write a polite e-mail that asks to move a meeting from Monday to Wednesday.",
)
DIALOGUES = (
    (
        "What is a hash table?",
        "How does it handle two keys with the same hash?",
        "Show that in a few lines of Python.",
    ),
    (
        "Name three planets of our solar system.",
        "Which of them is the largest?",
        "How many moons does it have?",
    ),
    ("I want to learn to cook. Where do I start?", "Which knife do I need first?", "How do I keep it sharp?"),
    ("Write a short poem about the sea.", "Now make it rhyme.", "Give it a title."),
    ("What does HTTP status 404 mean?", "And 503?", "Which of the two should a client retry, and why?"),
    ("Plan a weekend in Rome.", "We travel with two children.", "What if it rains on Sunday?"),
)
SYSTEM = "You are a careful assistant. Answer in full sentences and stay with the facts that you know."


@dataclass(frozen=True)
class Prompt:
    """A prompt. Prompts of one `group` share a prefix."""

    name: str
    kind: str  # "question", "shared", "prose", "code" or "dialogue"
    ids: tuple[int, ...]
    group: str = ""


def tokenizer(model: str | Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


@lru_cache
def chapter(name: str) -> str:
    """Chapter of Python's language reference."""
    from pydoc_data.topics import topics

    return topics[name]


@lru_cache
def prose() -> str:
    """Entire reference, about 100,000 words of English."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


@lru_cache
def source(module: str) -> str:
    return inspect.getsource(__import__(module))


def chat(tok, messages: list[dict[str, str]]) -> list[int]:
    """Token ids of a dialogue, up to the start of the model's answer."""
    text = tok.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tok(text, add_special_tokens=False).input_ids


def cut(tok, text: str, tokens: int, start: int = 0) -> list[int]:
    """`tokens` token ids of `text`, from token `start`."""
    ids = tok(text, add_special_tokens=False).input_ids[start : start + tokens]
    if len(ids) < tokens:
        raise ValueError(f"the text has {len(ids)} tokens from {start} on, not {tokens}")
    return ids


def questions(tok) -> list[Prompt]:
    return [
        Prompt(f"question-{i}", "question", tuple(chat(tok, [_user(q)]))) for i, q in enumerate(QUESTIONS)
    ]


def shared(tok, lengths: Iterable[int] = (200, 520, 1100, 1700)) -> list[Prompt]:
    """Groups of four questions about one long passage, which becomes a cached prefix."""
    asks = (
        "Summarise this text in one sentence.",
        "Which three terms does the text define? Name them only.",
        "Write one question that a reader could ask about the text.",
        "Rewrite its first sentence in simple words.",
    )
    out = []
    for n, length in enumerate(lengths):
        passage = tok.decode(cut(tok, chapter(CHAPTERS[n]), length))
        for i, ask in enumerate(asks):
            messages = [{"role": "system", "content": f"Answer from this text.\n\n{passage}"}, _user(ask)]
            out.append(
                Prompt(f"shared-{length}-{i}", "shared", tuple(chat(tok, messages)), f"shared-{length}")
            )
    return out


def long_prose(tok, lengths: Iterable[int] = (700, 1000, 1300, 1600, 2000, 2400, 2700, 3000)) -> list[Prompt]:
    """Passages to continue."""
    text = prose()
    return [
        Prompt(f"prose-{length}", "prose", tuple(cut(tok, text, length, start=4000 * n)))
        for n, length in enumerate(lengths)
    ]


def code(
    tok, lengths: Iterable[int] = (50, 90, 150, 230, 300, 400, 520, 640, 770, 900, 1030, 1200)
) -> list[Prompt]:
    """Starts of modules to continue."""
    out = []
    for module, length in zip(MODULES, lengths):
        ids = tok(source(module), add_special_tokens=False).input_ids[:length]
        out.append(Prompt(f"code-{module}", "code", tuple(ids)))
    return out


def dialogue(tok, n: int, answers: list[str]) -> Prompt:
    """Next turn of dialogue `n` after earlier turns with the answers `answers`."""
    messages = [{"role": "system", "content": SYSTEM}]
    for question, answer in zip(DIALOGUES[n], [*answers, None]):
        messages.append(_user(question))
        if answer is not None:
            messages.append({"role": "assistant", "content": answer})
    return Prompt(f"dialogue-{n}-{len(answers)}", "dialogue", tuple(chat(tok, messages)), f"dialogue-{n}")


def single(tok) -> list[Prompt]:
    """All 48 prompts that do not depend on an earlier answer. The dialogues add 18."""
    return [*questions(tok), *shared(tok), *long_prose(tok), *code(tok)]


def digest(prompts: Iterable[Prompt]) -> str:
    """Fingerprint of a list of prompts."""
    data = json.dumps([[p.name, list(p.ids)] for p in prompts])
    return hashlib.sha256(data.encode()).hexdigest()[:16]


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
