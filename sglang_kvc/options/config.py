"""What the user asked for, resolved: one frozen record of builtins that every other part reads.

Knows nothing of SGLang; `from_args` takes any object with `kvc_*` attributes, where None means "not given".
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from kvc_kernels.layout import BF16, FORMATS, Format, PageLayout
from kvc_kernels.scores.reference import STRIDES
from sglang_kvc.calibration import enforce
from sglang_kvc.options import request_quality

ALL, SALT = TRUST = ("all", "salt")
BLOCK_SIZE_STEP, BLOCK_SIZE_MAX = 64, 1024
PAGE_BYTES_STEP, PAGE_BYTES_MIN, PAGE_BYTES_MAX = 16, 512, 1 << 20
BASE = BF16.name  # as high format: nothing is compressed
WINDOW_MAX = 1 << 20
LEAST_KEY_BITS = 128  # of a token's key: tensor cores multiply 16 bytes of codes at a time
MEMORY_MIN = 1 << 20  # less than a megabyte is a slip of the unit, not a size


class ConfigError(ValueError):
    """A setting that cannot be served. The message is one sentence: what, why, and what to do instead."""


def _policies() -> dict[str, Any]:
    # At call time: the registry imports torch, which a reader of settings does not need.
    from sglang_kvc.policies import POLICIES

    return POLICIES


def policy_names() -> tuple[str, ...]:
    """Names that `--kvc-policy` accepts."""
    return tuple(_policies())


def policy_options(policy: str) -> dict[str, Any]:
    """The settings that a policy reads, with its own defaults: the fields of its dataclass."""
    return {f.name: f.default for f in fields(_policies()[policy])}


def flag(name: str) -> str:
    """Field name -> the command-line option that sets it."""
    return "--kvc-" + name.replace("_", "-")


def listed(names) -> str:
    """'a, b or c'."""
    names = list(names)
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " or " + names[-1]


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {unit + "I": 1 << (10 * i) for i, unit in enumerate("KMGT", start=1)}


def parse_bytes(text: str | int) -> int:
    """'4GB' -> 4_000_000_000, '512MiB' -> 536_870_912, '1e9' and plain numbers are bytes."""
    m = re.fullmatch(r"(\d+(?:\.\d+)?(?:E\d+)?)\s*([KMGT]?I?)B?", str(text).strip().upper())
    if not m or m[2] not in _UNITS or not math.isfinite(float(m[1])):
        raise ConfigError(f"{flag('memory')} {text!r} is not a size; write it like 4GB, 512MiB or 4000000000.")
    return int(float(m[1]) * _UNITS[m[2]])


@dataclass(frozen=True)
class KvcConfig:
    """The resolved settings of one server.

    `high` and `low` are page formats by name; `low` is None when the ladder has a single packed format. `memory` is
    the size of the page pool in bytes, `page_bytes` the size of a page; None leaves both to the pool. `observe` is
    "all" or the number of last queries whose attention is counted. `budget` (`4x`, or bytes per token) takes the place
    of `keep`; `scorer` and `share` are names, perhaps with settings (`snapkv:window=64`); `calibration` is a file;
    `levels` are the formats, separated by commas, that single requests may ask for; `trust` says which requests may
    share blocks whose content depends on the request that filled them: all, or those with the same cache salt;
    `allow_lossless` whether single requests may ask for an uncompressed cache.
    """

    policy: str = "quantise"
    high: str = "k4v4"
    low: str | None = None
    window: int = 0
    block_size: int = 128
    keep: float = 0.5
    alpha_high: float = 1.0
    alpha_low: float = 0.02
    observe: str | int = "all"
    page_bytes: int | None = None
    memory: int | None = None
    budget: str | None = None
    scorer: str = "keydiff"
    share: str = "global"
    sinks: int = 0
    calibration: str | None = None
    levels: str | None = None
    trust: str = ALL
    allow_lossless: bool = True

    @classmethod
    def from_args(cls, args: Any) -> KvcConfig:
        """Read the `kvc_*` attributes of `args` (a ServerArgs), fill in the policy's defaults, and validate."""
        given = {f.name: getattr(args, "kvc_" + f.name, None) for f in fields(cls)}
        given = {k: v for k, v in given.items() if v is not None}
        for name in given:
            given[name] = _coerce(name, given[name])
        policy = given.get("policy", cls.policy)
        _check_policy(policy)
        _check_unread(policy, given)
        if "keep" in given and "budget" in given:
            raise ConfigError(
                f"{flag('keep')} and {flag('budget')} contradict each other, because a budget decides what share of "
                f"the pages is kept; drop one of them."
            )
        if given.get("high") == BASE and "low" not in given:
            # Nothing is ever packed, so no policy has anything to decide: the same ladder under one name.
            for option in sorted((set(policy_options(policy)) - set(policy_options("quantise"))) & set(given)):
                raise ConfigError(
                    f"{flag(option)} has no effect with {flag('high')} {BASE}, which compresses and drops nothing; "
                    f"drop one of them."
                )
            return cls(**{**given, "policy": "quantise"}).validate()
        given.setdefault("window", _policies()[policy].default_window)
        options = policy_options(policy)
        return cls(**{**options, **enforce.defaults(policy, options, given), **given}).validate()

    def validate(self) -> KvcConfig:
        """Raise `ConfigError` at the first setting that makes no sense; returns self."""
        _check_policy(self.policy)
        _check_formats(self)
        _check_sizes(self)
        _check_scores(self)
        _check_parts(self)
        _check_verdicts(self)
        return self

    @property
    def formats(self) -> tuple[Format, ...]:
        """The packed formats of the ladder, from high to low; empty for the bf16 base."""
        names = [self.high, *([self.low] if self.low else []), *request_quality.names(self.levels)]
        return tuple(FORMATS[n] for n in names if FORMATS[n].packed)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def summary(self) -> str:
        """One short line for logs: policy, formats, and the settings that this policy reads."""
        tiers = self.high + (f"+{self.low}" if self.low else "")
        reads = [o for o in policy_options(self.policy) if o not in ("high", "low")]
        if self.budget is not None:
            reads = [o for o in reads if o != "keep"]
        extra = "".join(f", {o} {getattr(self, o)}" for o in reads if getattr(self, o) is not None)
        return f"{self.policy} {tiers}, block {self.block_size}, window {self.window}{extra}"

    def with_options(self, **changes: Any) -> KvcConfig:
        return replace(self, **changes).validate()


_INTEGERS = ("window", "block_size", "page_bytes", "sinks")
_NUMBERS = ("keep", "alpha_high", "alpha_low")


def _coerce(name: str, value: Any) -> Any:
    """A number given as text (command line, YAML) becomes a number; anything else is refused with its name."""
    if name in _INTEGERS:
        try:
            if isinstance(value, bool) or int(value) != float(value):
                raise ValueError
            return int(value)
        except (TypeError, ValueError, OverflowError):
            raise ConfigError(f"{flag(name)} {value!r} is not a whole number; give one like 256.") from None
    if name in _NUMBERS:
        try:
            number = float(value)
            if isinstance(value, bool) or not math.isfinite(number):
                raise ValueError
            return number
        except (TypeError, ValueError):
            raise ConfigError(f"{flag(name)} {value!r} is not a number; give one like 0.5.") from None
    if name == "memory":
        return parse_bytes(value)
    if name == "allow_lossless":
        if str(value).lower() not in ("true", "false"):
            raise ConfigError(f"{flag(name)} {value!r} is not a choice; give true or false.")
        return str(value).lower() == "true"
    if name == "observe":
        text = str(value).lower()
        if text == "all" or text in {f"all/{s}" for s in STRIDES}:
            return text
        if not text.isdigit() or int(text) < 1:
            raise ConfigError(
                f"{flag(name)} {value!r} is not a number of queries; give 'all', 'all/16' for one in 16 (powers of two "
                "up to 64), or a whole number from 1, like 32."
            )
        return int(text)
    return str(value) if name == "calibration" else str(value).lower()


def _check_policy(policy: str) -> None:
    names = policy_names()
    if policy not in names:
        raise ConfigError(f"{flag('policy')} {policy!r} is not a policy; choose {listed(names)}.")


def _check_unread(policy: str, given: dict[str, Any]) -> None:
    """An option that the policy does not read is refused, not ignored."""
    for option in given:
        users = [p for p in policy_names() if option in policy_options(p)]
        if users and policy not in users:
            users = [p for p in users if not _policies()[p].preset]
            raise ConfigError(
                f"{flag(option)} has no effect with policy {policy}, which does not read it; "
                f"drop it or choose {flag('policy')} {listed(users)}."
            )


def _check_formats(c: KvcConfig) -> None:
    for name in ("high", "low"):
        value = getattr(c, name)
        if value is not None and value not in FORMATS:
            raise ConfigError(f"{flag(name)} {value!r} is not a page format; choose {listed(FORMATS)}.")
    offered = request_quality.names(c.levels)
    for name in offered:
        if name not in FORMATS or not FORMATS[name].packed or name == c.high or offered.count(name) > 1:
            packed = [n for n, f in FORMATS.items() if f.packed and n != c.high]
            raise ConfigError(
                f"{flag('levels')} {c.levels} cannot be offered, because {name!r} is not another packed format; list "
                f"some of {listed(packed)}, each once (lossless needs no listing)."
            )
    if c.trust not in TRUST:
        raise ConfigError(f"{flag('trust')} {c.trust!r} is not a choice; give {listed(TRUST)}.")
    if c.low is None:
        return
    high, low = FORMATS[c.high], FORMATS[c.low]
    if not high.packed:
        raise ConfigError(
            f"{flag('low')} {c.low} needs a quantised high format, because {c.high} pages are never re-packed in "
            f"part; choose {flag('high')} k8v4, or drop {flag('low')}."
        )
    if low.key_bits > high.key_bits or low.value_bits > high.value_bits or low == high:
        raise ConfigError(
            f"{flag('low')} {c.low} is not below {flag('high')} {c.high}, and tokens only move down the ladder; "
            f"choose a low format with fewer bits, like k4v2 under k8v4."
        )


def _check_sizes(c: KvcConfig) -> None:
    if not (BLOCK_SIZE_STEP <= c.block_size <= BLOCK_SIZE_MAX) or c.block_size % BLOCK_SIZE_STEP:
        raise ConfigError(
            f"{flag('block_size')} {c.block_size} cannot be used, because a block is a whole number of tiles of "
            f"{BLOCK_SIZE_STEP} tokens, up to {BLOCK_SIZE_MAX}; choose 64, 128, 256 or another multiple of 64."
        )
    if not 0 <= c.window <= WINDOW_MAX:
        raise ConfigError(
            f"{flag('window')} {c.window} is out of range, because it counts tokens kept unpacked at the end of a "
            f"sequence; choose 0 to {WINDOW_MAX}, like 64."
        )
    p = c.page_bytes
    if p is not None and (p % PAGE_BYTES_STEP or not PAGE_BYTES_MIN <= p <= PAGE_BYTES_MAX):
        raise ConfigError(
            f"{flag('page_bytes')} {p} cannot be used, because a page is a multiple of {PAGE_BYTES_STEP} bytes from "
            f"{PAGE_BYTES_MIN} to {PAGE_BYTES_MAX}; choose one, or drop the option to have the best size chosen."
        )
    if c.memory is not None and c.memory < MEMORY_MIN:
        raise ConfigError(
            f"{flag('memory')} of {c.memory} bytes holds no cache worth the name; give at least 1MiB, like 4GB."
        )


def _check_scores(c: KvcConfig) -> None:
    if not 0 < c.keep <= 1:
        raise ConfigError(
            f"{flag('keep')} {c.keep:g} is out of range, because it is the share of a block's pages that stays; "
            f"choose a number above 0 and up to 1, like 0.5."
        )
    if c.sinks < 0 or c.sinks > c.block_size:
        raise ConfigError(
            f"{flag('sinks')} {c.sinks} is out of range, because it counts tokens at the start of a sequence's first "
            f"block of {c.block_size}; choose 0 to {c.block_size}, like 4."
        )
    if c.alpha_low < 0:
        raise ConfigError(
            f"{flag('alpha_low')} {c.alpha_low:g} is negative, but attention is not; choose 0 or more, like 0.02."
        )
    if c.alpha_low > c.alpha_high:
        raise ConfigError(
            f"{flag('alpha_low')} {c.alpha_low:g} is above {flag('alpha_high')} {c.alpha_high:g}, which leaves no room "
            f"for the low tier; choose alpha-low <= alpha-high, like 0.02 and 1."
        )


def _check_parts(c: KvcConfig) -> None:
    """What a composed policy is made of: its parts exist, and the calibration file holds what they need."""
    if "scorer" not in policy_options(c.policy):
        return
    from sglang_kvc.calibration.tensors import tensor_names
    from sglang_kvc.policies import make_policy
    from sglang_kvc.policies.budget import Budget

    policy = make_policy(c)
    try:
        needs = policy.needs
    except ValueError as e:
        raise ConfigError(str(e)) from None
    if c.budget is not None:
        try:
            Budget.parse(c.budget)
        except ValueError as e:
            raise ConfigError(
                f"{flag('budget')} {e}; give how many times smaller than bf16 the cache shall be, like 4x, or the "
                f"bytes that a token may take, like 1200."
            ) from None
    what = f"{flag('scorer')} {c.scorer} with {flag('share')} {c.share}"
    if c.calibration is None:
        if needs:
            raise ConfigError(
                f"{what} needs statistics of the model ({listed(needs)}) and no file was given; add "
                f"{flag('calibration')} FILE, or choose another."
            )
        return
    if not needs:
        return
    try:
        missing = set(needs) - tensor_names(c.calibration)
    except ValueError as e:
        raise ConfigError(
            f"{flag('calibration')} {c.calibration} cannot be used, because {e}; give a safetensors file with "
            f"{listed(needs)}."
        ) from None
    if missing:
        raise ConfigError(
            f"{flag('calibration')} {c.calibration} cannot be used, because it holds no {listed(sorted(missing))}, "
            f"which {what} needs; give a file that does."
        )


def _check_verdicts(c: KvcConfig) -> None:
    """A calibration file has a say in the formats; one that has not, and that nothing else reads, is refused."""
    if c.calibration is None or enforce.check_formats(c):
        return
    from sglang_kvc.policies import make_policy

    if not make_policy(c).needs:
        raise ConfigError(
            f"{flag('calibration')} {c.calibration} has no effect with policy {c.policy}, which needs no statistics, "
            f"and the file judges no formats; drop it, or {enforce.AGAIN}."
        )


def check_pool(config: KvcConfig, *, layers: int, heads: int, head_dim: int) -> None:
    """What depends on the whole model, `heads` KV heads a rank: a budget in bytes, and the least memory."""
    from sglang_kvc.cache.sizing import make_layout, size_pool
    from sglang_kvc.policies import make_policy

    policy = make_policy(config)
    layout = make_layout(config, policy, layers=layers, heads=heads, head_dim=head_dim)
    try:
        policy.check(layout)
        if config.memory is not None:
            size_pool(config.memory, layout, policy.ladder(layout))
    except ValueError as e:
        raise ConfigError(f"{str(e)[0].upper()}{str(e)[1:].rstrip('.')}.") from None


def wasted_levels(config: KvcConfig, *, head_dim: int) -> list[str]:
    """A sentence for each format of `levels` whose blocks take as many pages as those of a more precise one: a page
    has one size for all formats, and fits the first of `formats`."""
    from sglang_kvc.cache.sizing import make_layout
    from sglang_kvc.policies import make_policy

    layout = make_layout(config, make_policy(config), layers=1, heads=1, head_dim=head_dim)
    out = []
    for name in request_quality.names(config.levels):
        fmt, pages = FORMATS[name], layout.block_pages(FORMATS[name])
        better = [
            f for f in FORMATS.values()
            if f.packed and f != fmt and f.key_bits >= fmt.key_bits and f.value_bits >= fmt.value_bits
            and layout.block_pages(f) <= pages
        ]  # fmt: skip
        if better:
            best = max(better, key=lambda f: (f.key_bits + f.value_bits, f.name == config.high))
            there = best in config.formats
            out.append(
                f"{flag('levels')} {name} takes as much memory as {best.name} here, because pages fit "
                f"{config.formats[0].name}; {'drop it' if there else f'offer {best.name} instead'}."
            )
    return out


def check_geometry(config: KvcConfig, *, head_dim: int) -> None:
    """What depends on the model's head size: a page must hold a group of tokens in every format, and a ratio given as
    budget must be possible.
    """
    from sglang_kvc.cache.sizing import make_layout
    from sglang_kvc.policies import make_policy

    policy = make_policy(config)
    for fmt in config.formats:
        if head_dim * fmt.key_bits < LEAST_KEY_BITS:
            least = -(-LEAST_KEY_BITS // head_dim)
            raise ConfigError(
                f"{fmt.name} cannot be used at this model's head size {head_dim}, because a token's key would be fewer "
                f"bytes than the kernels multiply at a time; choose a format with keys of {least} bits or more."
            )
    for fmt in (BF16, *config.formats) if config.page_bytes is not None else ():
        if PageLayout(fmt, head_dim, config.page_bytes, policy.observes).tokens == 0:
            raise ConfigError(
                f"{flag('page_bytes')} {config.page_bytes} is too small for {fmt.name} at this model's head size "
                f"{head_dim}; choose a larger page, or drop the option to have the best size chosen."
            )
    if (config.budget or "").endswith("x"):
        try:
            # The same for every number of layers and heads: both sides grow with it.
            layout = make_layout(config, policy, layers=1, heads=1, head_dim=head_dim)
            policy.high_pages(layout)  # type: ignore[attr-defined]  # policies with a budget have it
        except ValueError as e:
            raise ConfigError(f"{e}.") from None
