"""Prompts with known answers: JSON lines with `prompt`, `answer` and optionally `context`, the text before `prompt`.

Each text is tokenized by itself, so that a context has the same tokens in all of its items. Items with the same
context, or with the same prompt and no context, form one `SharedPrompt`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .capture import CalibrateError

FORMAT = 'give JSON lines like {"context": "...", "prompt": "...", "answer": "..."}'


@dataclass(frozen=True)
class Item:
    """One line. `context` "": the prompt is the shared text."""

    line: int
    context: str
    prompt: str
    answer: str


@dataclass(frozen=True)
class Question:
    """`rest`: all tokens after the planned ones; the last `answer_tokens` of them are the answer."""

    rest: tuple[int, ...]
    answer_tokens: int


@dataclass
class SharedPrompt:
    """`ids`: tokens of the context, or of the prompt without one. The first `planned`, whole blocks, are planned."""

    ids: tuple[int, ...]
    planned: int
    questions: list[Question] = field(default_factory=list)


def read(path: str) -> list[Item]:
    """The items of a file; empty lines are skipped."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as e:
        raise CalibrateError(f"--answers {path} cannot be read ({e}); {FORMAT}") from None
    return [_item(path, i, line) for i, line in enumerate(lines, 1) if line.strip()]


def _item(path: str, number: int, line: str) -> Item:
    try:
        record: Any = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise CalibrateError(f"line {number} of --answers {path} is not a JSON object; {FORMAT}")
    texts = {"context": "", **record}
    for key in ("prompt", "answer", "context"):
        if not isinstance(texts.get(key), str) or not (texts[key] or key == "context"):
            raise CalibrateError(f'line {number} of --answers {path} has no text "{key}"; {FORMAT}')
    return Item(number, texts["context"], texts["prompt"], texts["answer"])


def shared_prompts(items: list[Item], tokenizer, block: int, longest: int | None) -> list[SharedPrompt]:
    """The items' tokens, without items whose context or prompt has no whole block. `longest`: what the model reads."""
    out: dict[tuple[bool, str], SharedPrompt] = {}
    for item in items:
        first, *later = [text for text in (item.context, item.prompt, item.answer) if text]
        pieces = [tokenizer(first, verbose=False).input_ids]
        pieces += [tokenizer(text, add_special_tokens=False, verbose=False).input_ids for text in later]
        if not all(pieces):
            raise CalibrateError(f"a text in line {item.line} of --answers has no tokens; {FORMAT}")
        shared, tokens = pieces[0], [token for piece in pieces for token in piece]
        if longest and len(tokens) > longest:
            raise CalibrateError(
                f"line {item.line} of --answers has {len(tokens)} tokens, more than the {longest} that this model "
                f"reads; give shorter prompts"
            )
        # The last token of a prompt is never planned, because its query predicts the answer's first token.
        planned = (len(shared) - (not item.context)) // block * block
        if planned:
            prompt = out.setdefault((bool(item.context), first), SharedPrompt(tuple(shared), planned))
            prompt.questions.append(Question(tuple(tokens[planned:]), len(pieces[-1])))
    if not out:
        raise CalibrateError(
            f"no context or prompt of --answers has a whole block of {block} tokens; give longer contexts or prompts"
        )
    return list(out.values())
