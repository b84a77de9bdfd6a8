"""Per-request quality ("level"), in SGLang's `custom_params`: `{"kvc": "lossless"}`, a format that the server offers
with `--kvc-levels`, `{"kvc": "k8v4"}`, or a budget for the whole prompt, `{"kvc": "one-shot:16x"}`. With `--kvc-floor`
a request may also name the server's own format, which its blocks then keep. `--kvc-one-shot` is the budget of requests
that name no level (`request_limits.default_budget`).

A level is a namespace of the radix tree: blocks of different levels are never shared. So a lossless request never reads
a packed block, and no other request keeps an uncompressed block alive. If its attention scores decide which tokens its
blocks keep, a request without a salt has its own namespace, unless `--kvc-trust all` is set. A one-shot request always
has its own.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Sequence
from typing import Any

from kvc_kernels.formats import FORMATS
from sglang_kvc.cache import one_shot
from sglang_kvc.options.config import KvcConfig
from sglang_kvc.policies import LOSSLESS, POLICIES

PARAMETER = "kvc"
ELASTIC = re.compile(r"(?:^|\|)elastic_ep_size=\d+$")
ONE_SHOT_NEEDS = "policy quantize, safe or balanced in a packed format, --kvc-window 0 and --kvc-allow-one-shot true"


def offered(config: KvcConfig) -> tuple[str, ...]:
    """Levels that requests to this server may ask for. `one_shot.PREFIX` stands for all budgets."""
    packs = POLICIES[config.policy].keeps_all and FORMATS[config.high].packed and not config.window
    budgets = [one_shot.PREFIX] if config.allow_one_shot and packs else []
    # With a floor, blocks of a request that names `high` keep it.
    named = [*config.levels, *([config.high] if config.floor else [])]
    return (*([LOSSLESS] if config.allow_lossless else []), *budgets, *named)


def asks(custom_params: Any) -> bool:
    """Whether a request gives a level, or custom parameters that are not an object."""
    if isinstance(custom_params, dict):
        return custom_params.get(PARAMETER) is not None
    return custom_params is not None


def level_of(custom_params: Any, offered: Sequence[str] = (LOSSLESS,), default: str | None = None) -> str | None:
    """The level that a request asks for, None for the server's default, which `default` also names
    (`Policy.default_level`). ValueError for any other value: one sentence that quotes only the start and end of the
    value.
    """
    if not asks(custom_params):
        return None
    if not isinstance(custom_params, dict):
        raise ValueError(
            f"custom_params is {reprlib.repr(custom_params)}, which is not a JSON object; write it like "
            f'{{"{PARAMETER}": "{LOSSLESS}"}}.'
        )
    level = custom_params[PARAMETER]
    if is_one_shot(level):
        if one_shot.PREFIX not in offered:
            raise ValueError(
                f'custom_params["{PARAMETER}"] is {reprlib.repr(level)}, which this server does not offer, because it '
                f"needs {ONE_SHOT_NEEDS}; omit it for the server's default."
            )
        return str(one_shot.Budget.parse(level))
    if isinstance(level, str) and level in offered:
        return level
    if default is not None and level == default:
        return None
    why = "this server does not allow" if level == LOSSLESS else "is not a level of the compressed cache"
    examples = {LOSSLESS: f'"{LOSSLESS}" (never compressed)', one_shot.PREFIX: f'"{one_shot.PREFIX}:16x"'}
    choices = [examples.get(name, f'"{name}"') for name in (*offered, *([default] if default else []))]
    give = f"give {', '.join(choices)}, or " if choices else ""
    raise ValueError(
        f'custom_params["{PARAMETER}"] is {reprlib.repr(level)}, which {why}; {give}omit it for the server\'s default.'
    )


def is_one_shot(level: Any) -> bool:
    """Whether a level asks, correctly or not, for a budget of the whole prompt."""
    return isinstance(level, str) and level.strip().lower().startswith(one_shot.PREFIX)


def level(req: Any) -> str | None:
    """The level of SGLang's request, which the request or `--kvc-one-shot` names; None for the server's format, and for
    a request that never entered SGLang's queue."""
    return getattr(req, "kvc_level", None)


def salted(req: Any) -> bool:
    """Whether the client of SGLang's request gave a `cache_salt` or an `extra_key`. SGLang appends the id of the LoRA
    adapter and the size of an elastic expert group to the latter."""
    given = ELASTIC.sub("", req.extra_key or "")
    return bool(req.cache_salt) or given != (req.lora_id or "")


def namespace(extra_key: str | None, level: str | None, private: int | None = None) -> str | None:
    """The level, followed by SGLang's `extra_key` (cache salt, LoRA), so that no request's key can imitate another
    level.

    `private`: a number unique to the request or its session, for a namespace that no other request finds."""
    if private is not None:
        return f"{PARAMETER}={level or ''}#{private}|{extra_key or ''}"
    if level is None and not (extra_key or "").startswith(f"{PARAMETER}="):
        return extra_key
    return f"{PARAMETER}={level or ''}|{extra_key or ''}"


def is_private(namespace: str | None) -> bool:
    """Whether the key is that of a single request or session."""
    head = (namespace or "").partition("|")[0]
    return head.startswith(f"{PARAMETER}=") and "#" in head
