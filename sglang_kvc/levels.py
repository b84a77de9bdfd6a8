"""What a single request may ask of the cache, in SGLang's `custom_params`: `{"kvc": "lossless"}`.

A level is a namespace of the radix tree: blocks of different levels are never shared, so an exact request never reads a
packed block and a cheap one never keeps an exact block alive.
"""

from __future__ import annotations

from typing import Any

PARAMETER = "kvc"
LOSSLESS = "lossless"
LEVELS = {LOSSLESS: "nothing of it is ever compressed"}


def level_of(custom_params: Any) -> str | None:
    """The level that a request asks for, None for the server's policy. ValueError (one sentence) for another value."""
    if not isinstance(custom_params, dict) or custom_params.get(PARAMETER) is None:
        return None
    level = custom_params[PARAMETER]
    if not isinstance(level, str) or level not in LEVELS:
        known = ", ".join(f'"{name}" ({what})' for name, what in LEVELS.items())
        raise ValueError(
            f'custom_params["{PARAMETER}"] is {level!r}, which is not a level of the compressed cache; give {known}, '
            "or leave it out for what the server was started with."
        )
    return level


def is_lossless(req: Any) -> bool:
    """Whether SGLang's request asked for exact blocks; false for one that never passed its queue."""
    return getattr(req, "kvc_level", None) == LOSSLESS


def namespace(extra_key: str | None, level: str) -> str:
    """SGLang's `extra_key` (cache salt, LoRA) with the level added."""
    return f"{extra_key or ''}|{PARAMETER}={level}"
