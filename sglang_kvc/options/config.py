"""`KvcConfig`: the settings of one server, independent of SGLang. `resolve` creates it from server arguments."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from kvc_kernels.formats import FORMATS, Format
from kvc_kernels.ops import ScoreSampling
from sglang_kvc.cache.one_shot import Budget as PromptBudget
from sglang_kvc.policies import POLICIES
from sglang_kvc.policies.allocation import Global, Share
from sglang_kvc.policies.budget import Budget
from sglang_kvc.policies.ladder import steps
from sglang_kvc.policies.parse import observe_text
from sglang_kvc.policies.scorers import KeyDiff, Scorer

ALL, SALT = TRUST = ("all", "salt")
RADIX, REUSE = EVICTIONS = ("radix", "reuse")


@dataclass(frozen=True)
class KvcConfig:
    """The resolved settings of one server, all parsed."""

    policy: str = "quantize"
    high: str = "k4v4"  # page format of the important tokens, or of all
    low: str | None = None  # page format of the other tokens; None: one packed format
    window: int = 0  # latest tokens of a sequence that stay uncompressed
    block_size: int = 128  # tokens
    keep: float = 0.5  # share of a block's pages; `budget` overrides it
    alpha_high: float = 1.0
    alpha_low: float = 0.02
    observe: ScoreSampling = field(default=ScoreSampling())  # queries whose attention scores are collected
    page_bytes: int | None = None  # None: chosen for the formats
    memory: int | None = None  # bytes of the page pool; None: sized by SGLang
    host_memory: int = 0  # bytes of host memory, on each rank, for blocks that leave the pool
    disk: str | None = None  # folder of the disk tier
    disk_size: int | None = None  # maximum bytes of its files; None: most of the free space
    storage: str | None = None  # SGLang's name of a storage backend, in place of `disk`
    eviction: str = RADIX  # which blocks are evicted first: by SGLang's --radix-eviction-policy, or by expected reuse
    running_share: float | None = None  # of the memory, see `cache.running_share`; None: the server decides
    budget: Budget | None = None
    scorer: Scorer = field(default=KeyDiff())
    share: Share = field(default=Global())
    sinks: int = 0  # first tokens of a sequence that are never dropped
    calibration: str | None = None  # path of a file that `sglang-kvc calibrate` wrote
    levels: tuple[str, ...] = ()  # formats that single requests may ask for
    floor: str | None = None  # lowest format that cold blocks move to; None: packed blocks keep their format
    trust: str = SALT  # which requests share blocks that depend on one request's queries: all, or those of one salt
    allow_lossless: bool = True  # whether single requests may ask for an uncompressed cache
    allow_one_shot: bool = True  # whether single requests may ask for a budget of their whole prompt
    one_shot: PromptBudget | None = None  # budget of the prompts of requests that name no level
    lag: int = 0  # number of tokens that follow a block when it is planned; 0: the window

    @property
    def isolates_salts(self) -> bool:
        """Whether blocks that depend on one request's queries are shared only under the same `cache_salt`."""
        return self.trust == SALT

    @property
    def store_option(self) -> str | None:
        """The option that sets the tier below host memory; None without one."""
        return "--kvc-disk" if self.disk else "--hicache-storage-backend" if self.storage else None

    @property
    def formats(self) -> tuple[Format, ...]:
        """Packed formats that blocks may have, the server's own first; empty if it compresses nothing."""
        names = [self.high, *([self.low] if self.low else []), *steps(self.high, self.floor), *self.levels]
        return tuple(FORMATS[n] for n in names if FORMATS[n].packed)

    def to_dict(self) -> dict[str, Any]:
        """Settings by name, JSON-ready; parsed values as their text."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}

    def summary(self) -> str:
        """One short line for logs: policy, formats, and the settings that this policy reads."""
        tiers = self.high + (f"+{self.low}" if self.low else "")
        omitted = ("high", "low", "keep") if self.budget is not None else ("high", "low")
        names = [f.name for f in fields(POLICIES[self.policy]) if f.name not in omitted]
        values = {name: _plain(getattr(self, name)) for name in names}
        extra = "".join(f", {name} {value}" for name, value in values.items() if value is not None)
        default = f", {self.one_shot}" if self.one_shot else ""
        return f"{self.policy} {tiers}, block {self.block_size}, window {self.window}{extra}{default}"


def _plain(value: Any) -> bool | int | float | str | None:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, tuple):
        return ",".join(value) or None
    return observe_text(value) if isinstance(value, ScoreSampling) else str(value)
