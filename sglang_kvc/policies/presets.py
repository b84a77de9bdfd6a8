"""Compositions under the names that people know. Every setting can still be given; these are its defaults.

A published method that only drops tokens is paired with k8v8, the packed format nearest to what it was published with.
What a preset's paper keeps recent is the window, which stays uncompressed.
"""

from __future__ import annotations

from dataclasses import field, make_dataclass
from typing import Any

from .base import Policy
from .prune import Prune
from .quantise import Quantise


def preset(
    name: str,
    doc: str,
    *,
    base: type[Policy] = Prune,
    window: int | None = None,
    page_tokens: int | None = None,
    **defaults: Any,
) -> type[Policy]:
    """`base` with other defaults, under a name of its own."""
    window = base.default_window if window is None else window
    namespace = {"name": name, "default_window": window, "page_tokens": page_tokens, "preset": True}
    namespace |= {"__doc__": doc, "__module__": __name__}
    changed = [(key, base.__annotations__[key], field(default=value)) for key, value in defaults.items()]
    title = "".join(word.capitalize() for word in name.split("-"))
    return make_dataclass(title, changed, bases=(base,), namespace=namespace, frozen=True)


PRESETS: tuple[type[Policy], ...] = (
    preset("safe", "8-bit keys, 4-bit values, nothing dropped.", base=Quantise, high="k8v4"),
    preset("balanced", "4 bits, nothing dropped; what is served unless told otherwise.", base=Quantise, high="k4v4"),
    preset(
        "max",
        "`quota` in k4v2 with pages of 32 tokens: 7 times smaller than bf16.",
        high="k4v2",
        keep=0.59,
        sinks=0,
        page_tokens=32,
    ),
    preset("quota", "KeyDiff, ranked over all layers and heads; needs keys only.", sinks=0),
    preset(
        "kv-compress",
        "KV-Compress (arXiv 2410.00161): KVC-w with squared attention, ranked over all layers and heads.",
        high="k8v8",
        scorer="kv-compress",
    ),
    preset("h2o", "H2O (arXiv 2306.14048): heavy hitters.", high="k8v8", scorer="h2o", share="uniform"),
    preset("snapkv", "SnapKV (arXiv 2404.14469).", high="k8v8", scorer="snapkv", share="uniform"),
    preset(
        "streaming-llm",
        "StreamingLLM (arXiv 2309.17453), block by block.",
        high="k8v8",
        scorer="streaming-llm",
        share="uniform",
    ),
    preset(
        "pyramid",
        "PyramidKV (arXiv 2406.02069): SnapKV's scores, fewer pages the higher the layer.",
        high="k8v8",
        scorer="snapkv",
        share="pyramid",
    ),
    preset(
        "minikv",
        "MiniKV (arXiv 2411.18077): heavy hitters and 128 recent tokens, a pyramid of depth 7, all at 2 bits.",
        window=128,
        high="k2v2",
        scorer="h2o",
        share="pyramid:beta=7",
    ),
    preset(
        "mikv",
        "MiKV (arXiv 2402.18096): heavy hitters at 4 bits, the others kept at 2; `keep` is the share of the former.",
        high="k4v4",
        low="k2v2",
        keep=0.25,
        scorer="h2o",
        share="uniform",
    ),
    preset(
        "xkv",
        "XKV: layers get what they were measured to need; SnapKV's scores within them.",
        high="k8v8",
        scorer="snapkv",
        share="xkv",
    ),
    preset(
        "ada-expected",
        "Expected attention (arXiv 2510.00636) with AdaKV's competition of heads: knows no request's queries.",
        scorer="expected-attention",
        share="ada",
    ),
    preset("random", "The control: a random choice of the same size.", scorer="random", share="uniform"),
)
