"""Extraction: a document of records that fills the context, and questions about one field of one record.

As in the dictionary, a question may concern any part of the context. All records have the same fields with values from
a small set, so only its position ties a value to its record. Three layouts alternate. The question ends with the start
of the answer in the document's layout, because small models then find records that they do not find otherwise.
"""

from __future__ import annotations

import random
import re

from bench.quality.tasks import Context, Maker, Question

FIELDS = {
    "owner": "Anna Boris Clara David Elena Frank Greta Hugo Irene James Karin Louis Maria Nina Oscar Paula".split(),
    "city": "Berlin Paris Madrid Oslo Vienna Dublin Prague Lisbon Athens Boston Denver Toronto Sydney Cairo".split(),
    "status": "idle running stopped failed paused starting draining locked".split(),
    "system": "Linux Windows Solaris Android Ubuntu Debian Fedora macOS".split(),
}
QUESTION_FIELDS = (*FIELDS, "price")


def _record(rng: random.Random) -> dict[str, str]:
    return {field: rng.choice(values) for field, values in FIELDS.items()} | {"price": str(rng.randrange(100, 1000))}


# Text before a name, between name and fields, between a field's name and its value, and after the value.
LAYOUTS = (("", ":\n", "  {}: ", "\n"), ("[", "]\n", "{} = ", "\n"), ('"', '": {\n', '  "{}": "', '",\n'))


def _format(layout: tuple[str, ...], name: str, record: dict[str, str]) -> str:
    before, after, field, end = layout
    return f"{before}{name}{after}" + "".join(f"{field.format(k)}{v}{end}" for k, v in record.items())


def records(maker: Maker, number: int, tokens: int, count: int = 8) -> Context:
    rng = random.Random(f"records {number}")
    layout = LAYOUTS[number % len(LAYOUTS)]
    head = f"{maker.head}Here is a list of servers.\n\n"
    servers: dict[str, dict[str, str]] = {}
    n = len(maker.ids(head)) + 10
    for name in rng.sample(maker.words, len(maker.words)):
        fields = _record(rng)
        n += len(maker.ids(_format(layout, name, fields)))
        if n > tokens:
            break
        servers[name] = fields
    text = head + "".join(_format(layout, name, fields) for name, fields in servers.items())
    fields = rng.sample(QUESTION_FIELDS, len(QUESTION_FIELDS))
    names = rng.sample(sorted(servers), min(count, len(servers)))
    questions = [
        _question(maker, layout, name, fields[i % len(fields)], servers[name]) for i, name in enumerate(names)
    ]
    return Context(f"records-{number}", tuple(maker.ids(text)), tuple(questions))


def _question(maker: Maker, layout: tuple[str, ...], name: str, field: str, record: dict[str, str]) -> Question:
    before, after, between, _ = layout
    # No space at the end, because the first token of an answer includes it.
    begin = f"{before}{name}{after}{between.format(field).rstrip(' ')}"
    return maker.question(f"What is the {field} of {name}?", begin, record[field])


def same_value(answer: str, text: str) -> bool:
    """Whether the generated text starts with the complete value; the first digits of a price do not suffice."""
    return bool(re.match(rf"{re.escape(answer)}(?![\w]|\.\d)", text.strip().lstrip("\"'`*:$ ")))
