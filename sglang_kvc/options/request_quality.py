"""What a single request may ask of the cache, in SGLang's `custom_params`: `{"kvc": "lossless"}`, or a format that the
server offers with `--kvc-levels`: `{"kvc": "k8v4"}`.

A level is a namespace of the radix tree: blocks of different levels are never shared, so an exact request never reads a
packed block and a cheap one never keeps an exact block alive. With `--kvc-trust salt` a request whose blocks carry its
evidence and that has no salt has a namespace of its own, too.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

PARAMETER = "kvc"
LOSSLESS = "lossless"


def names(text: str | None) -> tuple[str, ...]:
    """The formats that `--kvc-levels` lists."""
    return tuple(name.strip() for name in (text or "").lower().split(",") if name.strip())


def offered(config: Any) -> tuple[str, ...]:
    """The levels that requests to a server of this `KvcConfig` may ask for."""
    return (*([LOSSLESS] if config.allow_lossless else []), *names(config.levels))


def asks(custom_params: Any) -> bool:
    """Whether a request says anything about its level, or what cannot be understood."""
    if isinstance(custom_params, dict):
        return custom_params.get(PARAMETER) is not None
    return custom_params is not None


def level_of(custom_params: Any, offered: Sequence[str] = (LOSSLESS,), default: str | None = None) -> str | None:
    """The level that a request asks for, None for the server's policy. `default`: the format whose name asks for that,
    too (`Policy.own_level`). ValueError for another value: one sentence, which repeats no more than its start and end.
    """
    if not asks(custom_params):
        return None
    if not isinstance(custom_params, dict):
        raise ValueError(
            f"custom_params is {reprlib.repr(custom_params)}, which is no object; write it like "
            f'{{"{PARAMETER}": "{LOSSLESS}"}}.'
        )
    level = custom_params[PARAMETER]
    if isinstance(level, str) and level in offered:
        return level
    if default is not None and level == default:
        return None
    why = "this server does not allow" if level == LOSSLESS else "is not a level of the compressed cache"
    notes = {LOSSLESS: " (nothing of it is ever compressed)"}
    choices = [f'"{name}"{notes.get(name, "")}' for name in (*offered, *([default] if default else []))]
    give = f"give {', '.join(choices)}, or " if choices else ""
    raise ValueError(
        f'custom_params["{PARAMETER}"] is {reprlib.repr(level)}, which {why}; {give}leave it out for what the server '
        f"was started with."
    )


def level(req: Any) -> str | None:
    """What SGLang's request asked for; None for one that never passed its queue."""
    return getattr(req, "kvc_level", None)


def salted(req: Any) -> bool:
    """Whether SGLang's request brought a `cache_salt` or `extra_key`; SGLang appends the id of its LoRA adapter."""
    return (req.extra_key or "") != (req.lora_id or "")


def namespace(extra_key: str | None, level: str | None, private: int | None = None) -> str | None:
    """SGLang's `extra_key` (cache salt, LoRA) behind the level, so that no key of a request spells another's level.

    `private`: a number that no other request has, for a namespace that no other request finds."""
    if private is not None:
        return f"{PARAMETER}={level or ''}#{private}|{extra_key or ''}"
    if level is None and not (extra_key or "").startswith(f"{PARAMETER}="):
        return extra_key
    return f"{PARAMETER}={level or ''}|{extra_key or ''}"
