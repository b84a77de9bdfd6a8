"""Extraction: a document of records that fills the context, and questions about one field of one of them.

As in the dictionary, everything may be asked. A value belongs to its record only by its position, because all records
have the same fields, with values from a small set. Three layouts alternate. An answer begins in the layout of its
document, because small models find records this way that they do not find when asked in a sentence.
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
ASKED = (*FIELDS, "price")


def _record(rng: random.Random) -> dict[str, str]:
    return {field: rng.choice(values) for field, values in FIELDS.items()} | {"price": str(rng.randrange(100, 1000))}


# A layout: the text before a name, between name and fields, between a field's name and value, and after the value.
LAYOUTS = (("", ":\n", "  {}: ", "\n"), ("[", "]\n", "{} = ", "\n"), ('"', '": {\n', '  "{}": "', '",\n'))


def _written(layout: tuple[str, ...], name: str, record: dict[str, str]) -> str:
    before, behind, field, end = layout
    return f"{before}{name}{behind}" + "".join(f"{field.format(k)}{v}{end}" for k, v in record.items())


def records(maker: Maker, number: int, tokens: int, count: int = 8) -> Context:
    rng = random.Random(f"records {number}")
    layout = LAYOUTS[number % len(LAYOUTS)]
    head = f"{maker.head}Here is a list of servers.\n\n"
    servers: dict[str, dict[str, str]] = {}
    n = len(maker.ids(head)) + 10
    for name in rng.sample(maker.words, len(maker.words)):
        fields = _record(rng)
        n += len(maker.ids(_written(layout, name, fields)))
        if n > tokens:
            break
        servers[name] = fields
    text = head + "".join(_written(layout, name, fields) for name, fields in servers.items())
    asked = rng.sample(ASKED, len(ASKED))
    names = rng.sample(sorted(servers), min(count, len(servers)))
    questions = [
        _question(maker, layout, name, asked[i % len(asked)], servers[name]) for i, name in enumerate(names)
    ]
    return Context(f"records-{number}", tuple(maker.ids(text)), tuple(questions))


def _question(maker: Maker, layout: tuple[str, ...], name: str, field: str, record: dict[str, str]) -> Question:
    before, behind, between, _ = layout
    # Without a space at the end: the model's own tokens begin with it.
    begin = f"{before}{name}{behind}{between.format(field).rstrip(' ')}"
    return maker.question(f"What is the {field} of {name}?", begin, record[field])


def same_value(answer: str, text: str) -> bool:
    """Whether the generated text begins with the whole value; the first digits of a price do not suffice."""
    said = text.strip().lstrip("\"'`*:$ ")
    return bool(re.match(rf"{re.escape(answer)}(?![\w]|\.\d)", said))
