"""Conversion of server arguments to a `KvcConfig`: parses text, fills in the policy's defaults, and validates the
result."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from kvc_kernels.formats import BF16
from kvc_kernels.ops import ScoreSampling
from sglang_kvc.cache.one_shot import Budget as PromptBudget
from sglang_kvc.errors import ConfigError, flag, listed
from sglang_kvc.options.calibration_file import defaults_of
from sglang_kvc.options.config import KvcConfig
from sglang_kvc.options.validate import check_settings
from sglang_kvc.policies import POLICIES
from sglang_kvc.policies.allocation import Share
from sglang_kvc.policies.budget import Budget
from sglang_kvc.policies.parse import parse_observe
from sglang_kvc.policies.prune import parse_scorer, parse_share
from sglang_kvc.policies.scorers import Scorer


def resolve_config(args: Any) -> KvcConfig:
    """Settings from the `kvc_*` attributes of `args` (a ServerArgs); None means "not given". `ConfigError` at the first
    setting that cannot be served."""
    given = {f.name: getattr(args, "kvc_" + f.name, None) for f in fields(KvcConfig)}
    given["storage"] = getattr(args, "hicache_storage_backend", None)
    given = {name: _parsed(name, value) for name, value in given.items() if value is not None}
    policy = given.setdefault("policy", KvcConfig.policy)
    if policy not in POLICIES:
        raise ConfigError(f"{flag('policy')} {policy!r} is not a policy; choose {listed(POLICIES)}.")
    _check_unread(policy, given)
    if "keep" in given and "budget" in given:
        raise ConfigError(
            f"{flag('keep')} and {flag('budget')} contradict each other, because a budget decides what share of "
            f"the pages is kept; drop one of them."
        )
    if given.get("high") == BF16.name and "low" not in given:
        return check_settings(KvcConfig(**_uncompressed(given)))
    given.setdefault("window", POLICIES[policy].default_window)
    options = policy_options(policy)
    return check_settings(KvcConfig(**{**options, **defaults_of(policy, options, given), **given}))


def policy_options(policy: str) -> dict[str, Any]:
    """Settings that a policy reads, with its defaults: the fields of its dataclass."""
    return {f.name: f.default for f in fields(POLICIES[policy])}


def _check_unread(policy: str, given: dict[str, Any]) -> None:
    """Refuse an option that the policy does not read, because ignoring it would hide a mistake."""
    for option in given:
        readers = [name for name in POLICIES if option in policy_options(name)]
        if readers and policy not in readers:
            advised = [name for name in readers if not POLICIES[name].preset]
            raise ConfigError(
                f"{flag(option)} has no effect with policy {policy}, which does not read it; drop it or choose "
                f"{flag('policy')} {listed(advised)}."
            )


def _uncompressed(given: dict[str, Any]) -> dict[str, Any]:
    """Settings of a server that packs nothing. The policy is then always `quantize`, because there is nothing to
    decide."""
    for option in sorted((set(policy_options(given["policy"])) - set(policy_options("quantize"))) & set(given)):
        raise ConfigError(
            f"{flag(option)} has no effect with {flag('high')} {BF16.name}, which compresses and drops nothing; "
            f"drop one of them."
        )
    return {**given, "policy": "quantize"}


# ---- text to values


def _parsed(name: str, value: Any) -> Any:
    """The value of a setting given as text (command line, YAML) or as a value (an `Engine`)."""
    parse = _PARSERS.get(name)
    if parse is not None:
        return parse(name, value)
    return str(value).lower()


def _integer(name: str, value: Any) -> int:
    try:
        if isinstance(value, bool) or int(value) != float(value):
            raise ValueError
        return int(value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{flag(name)} {value!r} is not a whole number; give one like 256.") from None


def _number(name: str, value: Any) -> float:
    try:
        number = float(value)
        if isinstance(value, bool) or not math.isfinite(number):
            raise ValueError
        return number
    except (TypeError, ValueError):
        raise ConfigError(f"{flag(name)} {value!r} is not a number; give one like 0.5.") from None


def _truth(name: str, value: Any) -> bool:
    if str(value).lower() not in ("true", "false"):
        raise ConfigError(f"{flag(name)} {value!r} is not a choice; give true or false.")
    return str(value).lower() == "true"


def _names(name: str, value: Any) -> tuple[str, ...]:
    """Names separated by commas, or a tuple of them."""
    if not isinstance(value, (str, tuple)):
        raise ConfigError(f"{flag(name)} {value!r} is not text; write names separated by commas.")
    names = value.split(",") if isinstance(value, str) else value
    return tuple(n.strip().lower() for n in names if n.strip())


def _text(parse: Callable[[str], Any], kind: type) -> Callable[[str, Any], Any]:
    """A parser of text and numbers. A value of type `kind` is already parsed."""

    def parsed(name: str, value: Any) -> Any:
        if isinstance(value, kind):
            return value
        if not isinstance(value, (str, int, float)):
            raise ConfigError(f"{flag(name)} {value!r} is not text; write it as on the command line.")
        return parse(str(value).lower())

    return parsed


def _prompt_budget(text: str) -> PromptBudget:
    try:
        return PromptBudget.parse(text, flag("one_shot"))
    except ValueError as e:
        raise ConfigError(str(e)) from None


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {unit + "I": 1 << (10 * i) for i, unit in enumerate("KMGT", start=1)}


def parse_bytes(name: str, text: str | int) -> int:
    """'4GB' -> 4_000_000_000, '512MiB' -> 536_870_912; '1e9' and plain numbers are bytes."""
    m = re.fullmatch(r"(\d+(?:\.\d+)?(?:E\d+)?)\s*([KMGT]?I?)B?", str(text).strip().upper())
    if not m or m[2] not in _UNITS or not math.isfinite(float(m[1])):
        raise ConfigError(f"{flag(name)} {text!r} is not a size; write it like 4GB, 512MiB or 4000000000.")
    return int(float(m[1]) * _UNITS[m[2]])


_PARSERS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("window", "lag", "block_size", "page_bytes", "sinks"), _integer),
    **dict.fromkeys(("keep", "alpha_high", "alpha_low", "running_share"), _number),
    **dict.fromkeys(("allow_lossless", "allow_one_shot"), _truth),
    "levels": _names,
    **dict.fromkeys(("memory", "host_memory", "disk_size"), parse_bytes),
    "observe": _text(parse_observe, ScoreSampling),
    "budget": _text(Budget.parse, Budget),
    "one_shot": _text(_prompt_budget, PromptBudget),
    "scorer": _text(parse_scorer, Scorer),
    "share": _text(parse_share, Share),
    # Paths: upper and lower case differ.
    **dict.fromkeys(("calibration", "disk"), lambda name, value: str(value)),
}
