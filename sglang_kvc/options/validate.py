"""Checks of a `KvcConfig`: of its settings alone, and together with the model's geometry.

Each raises `ConfigError` with one sentence: what, why, and what to do instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kvc_kernels.formats import BF16, FORMATS
from kvc_kernels.layout import PageLayout, PoolLayout
from sglang_kvc.cache import one_shot
from sglang_kvc.cache.block_store import HEADER_BYTES
from sglang_kvc.cache.sizing import HostLayout, make_layout, size_server
from sglang_kvc.calibration.tensors import tensor_names
from sglang_kvc.errors import ConfigError, flag, listed
from sglang_kvc.options.calibration_file import check_verdicts
from sglang_kvc.options.config import EVICTIONS, TRUST, KvcConfig
from sglang_kvc.options.request_quality import ONE_SHOT_NEEDS, offered
from sglang_kvc.policies import POLICIES, make_policy
from sglang_kvc.policies.base import EVIDENCE
from sglang_kvc.policies.budget import compression
from sglang_kvc.policies.ladder import is_below

BLOCK_SIZE_STEP, BLOCK_SIZE_MAX = 64, 1024
PAGE_BYTES_STEP, PAGE_BYTES_MIN, PAGE_BYTES_MAX = 16, 512, 1 << 20
WINDOW_MAX = 1 << 20
MIN_KEY_BITS = 128  # minimum bits of a token's key codes: tensor cores multiply 16 bytes at a time
LONG_PROMPT = 1 << 20  # tokens of a prompt whose size does not depend on rounding to pages
MEMORY_MIN = 1 << 20  # less than a megabyte is a wrong unit, not a size


def check_settings(config: KvcConfig) -> KvcConfig:
    """`config`, if it passes `CHECKS`."""
    for check in CHECKS:
        check(config)
    return config


def _check_choices(c: KvcConfig) -> None:
    for name in ("high", "low"):
        value = getattr(c, name)
        if value is not None and value not in FORMATS:
            raise ConfigError(f"{flag(name)} {value!r} is not a page format; choose {listed(FORMATS)}.")
    if c.trust not in TRUST:
        raise ConfigError(f"{flag('trust')} {c.trust!r} is not a choice; give {listed(TRUST)}.")
    if c.eviction not in EVICTIONS:
        raise ConfigError(f"{flag('eviction')} {c.eviction!r} is not a choice; give {listed(EVICTIONS)}.")
    if c.running_share is not None and not 0 < c.running_share <= 1:
        given = f"{flag('running_share')} {c.running_share:g}"
        raise ConfigError(f"{given} is not a share above 0 and up to 1; give one like 0.5.")


def _check_levels(c: KvcConfig) -> None:
    for name in c.levels:
        if name not in FORMATS or not FORMATS[name].packed or name == c.high or c.levels.count(name) > 1:
            packed = [n for n, f in FORMATS.items() if f.packed and n != c.high]
            raise ConfigError(
                f"{flag('levels')} {','.join(c.levels)} cannot be offered, because {name!r} is not another packed "
                f"format; list some of {listed(packed)}, each once, with commas between them (lossless needs no "
                f"listing)."
            )


def _check_floor(c: KvcConfig) -> None:
    """Cold blocks move from a packed format to one with fewer bits."""
    if c.floor is None:
        return
    below = [name for name in FORMATS if is_below(name, c.high)]
    if c.floor in below:
        return
    if below:
        why, instead = f"only {listed(below)} have fewer bits", "choose one of these, or drop the option"
    else:
        why, instead = f"no format is below {c.high}", f"drop it, or choose {flag('high')} k8v4"
    raise ConfigError(
        f"{flag('floor')} {c.floor!r} cannot be the floor under {flag('high')} {c.high}, because {why}; {instead}."
    )


def _check_tiers(c: KvcConfig) -> None:
    """Two packed formats must be a high one and a low one."""
    if c.low is None:
        return
    high, low = FORMATS[c.high], FORMATS[c.low]
    if not high.packed:
        raise ConfigError(
            f"{flag('low')} {c.low} needs a quantized high format, because {c.high} pages are never re-packed in "
            f"part; choose {flag('high')} k8v4, or drop {flag('low')}."
        )
    if low.key_bits > high.key_bits or low.value_bits > high.value_bits or low == high:
        raise ConfigError(
            f"{flag('low')} {c.low} is not below {flag('high')} {c.high}, and tokens only move to lower tiers; "
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
            f"{flag('window')} {c.window} is out of range, because it counts tokens kept uncompressed at the end of a "
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
            f"{flag('memory')} of {c.memory} bytes is too small for a cache; give at least 1MiB, like 4GB."
        )


def _check_policy_settings(c: KvcConfig) -> None:
    if not 0 < c.keep <= 1:
        raise ConfigError(
            f"{flag('keep')} {c.keep:g} is out of range, because it is the share of a block's pages that is kept; "
            f"choose a number above 0 and up to 1, like 0.5."
        )
    if not 0 <= c.sinks <= c.block_size:
        raise ConfigError(
            f"{flag('sinks')} {c.sinks} is out of range, because it counts tokens at the start of a sequence's first "
            f"block of {c.block_size}; choose 0 to {c.block_size}, like 4."
        )
    if c.alpha_low < 0:
        raise ConfigError(
            f"{flag('alpha_low')} {c.alpha_low:g} is negative, but attention is not; choose 0 or more, like 0.02."
        )
    if c.alpha_high < 0:
        raise ConfigError(
            f"{flag('alpha_high')} {c.alpha_high:g} is negative, but attention is not; choose 0 or more, like 1."
        )
    if 0 < c.alpha_high < c.alpha_low:
        raise ConfigError(
            f"{flag('alpha_low')} {c.alpha_low:g} is above {flag('alpha_high')} {c.alpha_high:g}, which leaves no room "
            f"for the low tier; choose alpha-low <= alpha-high, like 0.02 and 1, or alpha-high 0 to store all tokens "
            f"high that are not pruned."
        )


def _check_lag(c: KvcConfig) -> None:
    """A lag must be longer than the window, long enough for `EVIDENCE` queries, and of use to the policy."""
    if c.lag == 0:
        return
    if c.lag % EVIDENCE or not c.window < c.lag <= WINDOW_MAX:
        default = f", the default of policy {c.policy}," if c.lag == getattr(POLICIES[c.policy], "lag", 0) else ""
        raise ConfigError(
            f"{flag('lag')} {c.lag}{default} is out of range, because it counts the tokens after a block, including "
            f"the {flag('window')} of {c.window}, whose queries decide which tokens it keeps; choose a larger "
            f"multiple of {EVIDENCE} up to {WINDOW_MAX}, like 512, or 0."
        )
    policy = make_policy(c)
    if not policy.collects_scores:
        raise ConfigError(
            f"{flag('lag')} has no effect with policy {c.policy} and {flag('scorer')} {c.scorer}, which reads no "
            f"queries; drop it, or choose {flag('scorer')} kv-compress."
        )
    if policy.answer_format and c.low is not None:
        raise ConfigError(
            f"{flag('lag')} cannot be used with {flag('low')} {c.low}, because the budget of an answer is a number of "
            f"high pages; drop one of them."
        )


def _check_one_shot(c: KvcConfig) -> None:
    """A default budget needs a server that offers budgets."""
    if c.one_shot is not None and one_shot.PREFIX not in offered(c):
        raise ConfigError(
            f"{flag('one_shot')} cannot be served, because one-shot prompts need {ONE_SHOT_NEEDS}; change these "
            f"options, or drop {flag('one_shot')}."
        )


def _check_statistics(c: KvcConfig) -> None:
    """The calibration file must hold the statistics that the policy needs."""
    needs = make_policy(c).needs
    if not needs:
        return
    parts = f"{flag('scorer')} {c.scorer} with {flag('share')} {c.share}"
    if c.calibration is None:
        raise ConfigError(
            f"{parts} needs statistics of the model ({', '.join(needs)}) and no file was given; add "
            f"{flag('calibration')} FILE, or choose another."
        )
    try:
        missing = set(needs) - tensor_names(c.calibration)
    except ValueError as e:
        raise ConfigError(
            f"{flag('calibration')} {c.calibration} cannot be used, because {e}; give a safetensors file with "
            f"{', '.join(needs)}."
        ) from None
    if missing:
        raise ConfigError(
            f"{flag('calibration')} {c.calibration} cannot be used, because it lacks {', '.join(sorted(missing))}, "
            f"which {parts} needs; give a file that has it."
        )


# In the order in which they run: a later check relies on the earlier ones.
CHECKS: tuple[Callable[[KvcConfig], None], ...] = (
    _check_choices,
    _check_levels,
    _check_floor,
    _check_tiers,
    _check_sizes,
    _check_policy_settings,
    _check_lag,
    _check_one_shot,
    _check_statistics,
    check_verdicts,
)


# ---- with the model's geometry


def check_geometry(config: KvcConfig, *, head_dim: int) -> None:
    """Checks that need the model's head size alone: a page holds a group of tokens in every format, packed blocks are
    smaller than uncompressed ones, and a budget given as a ratio can be met and drops something."""
    policy = make_policy(config)
    for fmt in config.formats:
        if head_dim * fmt.key_bits < MIN_KEY_BITS:
            min_bits = -(-MIN_KEY_BITS // head_dim)
            raise ConfigError(
                f"{fmt.name} cannot be used at this model's head size {head_dim}, because a token's key would be fewer "
                f"bytes than the kernels multiply at a time; choose a format with keys of {min_bits} bits or more."
            )
    for fmt in (BF16, *config.formats) if config.page_bytes is not None else ():
        if PageLayout(fmt, head_dim, config.page_bytes, policy.collects_scores).tokens == 0:
            raise ConfigError(
                f"{flag('page_bytes')} {config.page_bytes} is too small for {fmt.name} at this model's head size "
                f"{head_dim}; choose a larger page, or drop the option to have the best size chosen."
            )
    # One layer and head suffice: blocks, budgets and pages all grow in proportion to them.
    layout = make_layout(config, policy, layers=1, heads=1, head_dim=head_dim)
    if config.page_bytes is not None and FORMATS[config.high].packed and config.budget is None:
        planned = policy.block_formats(layout)[1]
        if planned.exact and compression(layout, planned.pages) <= 1:
            raise ConfigError(
                f"{flag('page_bytes')} {config.page_bytes} cannot be used, because a block of {config.high} then takes "
                f"{planned.pages} pages per head, which are no smaller than its uncompressed tokens; drop the option "
                f"to have the best size chosen."
            )
    if config.budget is not None and config.budget.ratio is not None:
        _check_budget(config, layout)


def _check_budget(config: KvcConfig, layout: PoolLayout) -> None:
    """Refuse a budget that cannot be met, and one that the format alone meets."""
    policy = make_policy(config)
    try:
        pages = policy.high_pages(layout)  # type: ignore[attr-defined]  # policies with a budget have it
    except ValueError as e:
        raise ConfigError(f"{e}.") from None
    if pages == layout.block_pages(FORMATS[config.high]):
        raise ConfigError(
            f"{flag('budget')} {config.budget} has no effect, because {config.high} alone makes blocks that small; "
            f"give a larger ratio or fewer bytes, or choose {flag('policy')} quantize."
        )


def check_one_shot(config: KvcConfig, *, head_dim: int, windowed: bool) -> None:
    """Checks of a default budget that need the model: its prompts can be one-shot, and long ones get smaller."""
    if (budget := config.one_shot) is None:
        return
    # One layer and head suffice: budget and pages both grow in proportion to them.
    layout, fmt = make_layout(config, make_policy(config), layers=1, heads=1, head_dim=head_dim), FORMATS[config.high]
    if (why := one_shot.why_unserved(layout, fmt, windowed=windowed)) is not None:
        raise ConfigError(
            f"{flag('one_shot')} cannot be served, because {why}; drop it, and prompts are stored in {fmt.name}."
        )
    if budget.ratio and budget.plan(layout, fmt, LONG_PROMPT // layout.block_tokens, LONG_PROMPT) is None:
        raise ConfigError(
            f"{flag('one_shot')} {budget.ratio:g}x has no effect, because {fmt.name} alone makes prompts that small; "
            f"give a larger ratio, like 16x, or drop it."
        )


def check_pool(config: KvcConfig, *, layers: int, heads: int, head_dim: int) -> None:
    """Checks that need the model's full geometry, with `heads` KV heads per rank: a budget in bytes, and the minimum
    of each tier."""
    policy = make_policy(config)
    layout = make_layout(config, policy, layers=layers, heads=heads, head_dim=head_dim)
    if config.budget is not None and config.budget.ratio is None:
        _check_budget(config, layout)
    try:
        policy.check(layout)
        block_formats = policy.block_formats(layout)
        if config.memory is not None:
            size_server(config.memory, config, policy, layout, block_formats, itemsize=2)
    except ValueError as e:
        raise ConfigError(f"{str(e)[0].upper()}{str(e)[1:].rstrip('.')}.") from None
    host, pages = HostLayout.of(layout, block_formats, 0), layout.block_pages_bf16
    needed = {
        "host_memory": host.units_for(pages) * host.unit_bytes,
        "disk_size": HEADER_BYTES + host.record.num_bytes(pages),
    }
    for name, block_bytes in needed.items():
        num_bytes = getattr(config, name)
        if num_bytes is None or (name == "host_memory" and num_bytes == 0):
            continue
        if num_bytes < block_bytes:
            raise ConfigError(
                f"{flag(name)} of {num_bytes} bytes does not hold an uncompressed block of this model; give at least "
                f"{math.ceil(10 * block_bytes / 2**20) / 10}MiB, like 64GB, or drop the option."
            )


def wasted_levels(config: KvcConfig, *, head_dim: int) -> list[str]:
    """A sentence for each format of `levels` whose blocks take as many pages as those of a more precise format.

    A page has one size for all formats, which fits the first of `formats`.
    """
    layout = make_layout(config, make_policy(config), layers=1, heads=1, head_dim=head_dim)
    out = []
    for name in config.levels:
        fmt, pages = FORMATS[name], layout.block_pages(FORMATS[name])
        better = [
            f for f in FORMATS.values()
            if f.packed and f != fmt and f.key_bits >= fmt.key_bits and f.value_bits >= fmt.value_bits
            and layout.block_pages(f) <= pages
        ]  # fmt: skip
        if better:
            best = max(better, key=lambda f: (f.key_bits + f.value_bits, f.name == config.high))
            instead = "drop it" if best in config.formats else f"offer {best.name} instead"
            out.append(
                f"{flag('levels')} {name} takes as much memory as {best.name} here, because pages fit "
                f"{config.formats[0].name}; {instead}."
            )
    return out
