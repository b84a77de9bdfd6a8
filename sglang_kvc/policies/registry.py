"""The list of policies: adding one is a file beside this one and a line here, or a line in `presets`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from .base import Policy
from .leankv import LeanKV
from .presets import PRESETS
from .prune import Prune
from .quantise import Quantise

POLICIES: dict[str, type[Policy]] = {p.name: p for p in (Quantise, LeanKV, Prune, *PRESETS)}  # type: ignore[attr-defined]


def make_policy(config: Any) -> Policy:
    """The policy that a `KvcConfig` names, with the settings that it reads."""
    cls = POLICIES[config.policy]
    return cls(**{name: getattr(config, name) for name in (f.name for f in fields(cls))})
