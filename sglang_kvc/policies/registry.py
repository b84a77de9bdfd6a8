"""The list of policies. Adding one takes a file in this folder and a line here, or a line in `presets`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from .base import Policy
from .presets import RECOMMENDED
from .prune import Prune
from .published.arkv import Arkv
from .published.leankv import LeanKV
from .published.presets import PUBLISHED
from .quantize import Quantize

PRESETS: tuple[type[Policy], ...] = (*RECOMMENDED, *PUBLISHED)
_ALL: tuple[type[Policy], ...] = (Quantize, Prune, *RECOMMENDED, LeanKV, Arkv, *PUBLISHED)
POLICIES: dict[str, type[Policy]] = {p.name: p for p in _ALL}


def make_policy(config: Any) -> Policy:
    """The policy that a `KvcConfig` names, with the settings that it reads."""
    cls = POLICIES[config.policy]
    return cls(**{f.name: getattr(config, f.name) for f in fields(cls)})
