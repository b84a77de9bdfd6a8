"""Prompts for SGLang's load generator that are passages of a text."""

from __future__ import annotations

import json
import random
from pathlib import Path


def write_passages(file: Path, text: Path, model: str, count: int, tokens: int, seed: int) -> None:
    """Write `count` passages of about `tokens` tokens each, from random places of `text`, as a data set that the
    generator calls `custom`. A passage is at most a few tokens off, because its text is tokenized again.

    Raises:
        ValueError: the text is shorter than one passage.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer.encode(text.read_text(), add_special_tokens=False)
    if len(ids) < tokens:
        raise ValueError(f"{text} has {len(ids)} tokens, but a prompt needs {tokens}")
    places = random.Random(seed)
    starts = [places.randrange(len(ids) - tokens + 1) for _ in range(count)]
    passages = [tokenizer.decode(ids[start : start + tokens]) for start in starts]
    rows = [{"conversations": [{"content": passage}, {"content": ""}]} for passage in passages]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
