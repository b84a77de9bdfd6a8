"""Recommended compositions under short names. A preset is a policy with other defaults; every setting can be given."""

from __future__ import annotations

from dataclasses import field, make_dataclass
from typing import Any

from .allocation import Ada, Uniform
from .base import Policy
from .prune import Prune
from .quantize import Quantize
from .scorers.expected_attention import ExpectedAttention
from .scorers.random import Random


def preset(
    name: str,
    doc: str,
    *,
    base: type[Policy] = Prune,
    window: int | None = None,
    page_tokens: int | None = None,
    **defaults: Any,
) -> type[Policy]:
    """`base` with other defaults, under its own name."""
    window = base.default_window if window is None else window
    namespace = {"name": name, "default_window": window, "page_tokens": page_tokens, "preset": True}
    namespace |= {"__doc__": doc, "__module__": __name__}
    changed = [(key, base.__annotations__[key], field(default=value)) for key, value in defaults.items()]
    title = "".join(word.capitalize() for word in name.split("-"))
    return make_dataclass(title, changed, bases=(base,), namespace=namespace, frozen=True)


RECOMMENDED: tuple[type[Policy], ...] = (
    preset("safe", "8-bit keys, 4-bit values, nothing dropped.", base=Quantize, high="k8v4"),
    preset("balanced", "4 bits, nothing dropped: a name for the default.", base=Quantize, high="k4v4"),
    preset(
        "max",
        "`quota` in k4v2 with pages of 32 tokens: 7 times smaller than bf16.",
        high="k4v2",
        keep=0.59,
        sinks=0,
        page_tokens=32,
    ),
    preset("quota", "KeyDiff, ranked over all layers and heads; reads keys only.", sinks=0),
    preset(
        "ada-expected",
        "Expected attention (arXiv 2510.00636) with AdaKV's competition of heads; reads no request's queries.",
        scorer=ExpectedAttention(),
        share=Ada(),
    ),
    preset("random", "A control: random tokens at the same size.", scorer=Random(), share=Uniform()),
)
