"""Statistics of a running server's cache: one record for the log line, `/server_info`, Prometheus and
`sglang-kvc inspect`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class KvcStats:
    """Counts of one rank. Bytes include all metadata: page slack, scales, tables, scores and positions.

    A packed block stands for `block_size` tokens of the sequence, pruned ones included; those of a one-shot prompt
    together stand for all of it. `tokens_by_tier` counts (layer, head, token) triples. It is empty, and `occupancy`
    None, if reading them would wait for the device.
    """

    config: str  # `KvcConfig.summary()`
    scope: str  # "block" or "sequence": what a block's content depends on
    bf16_token_bytes: int  # bytes of one uncompressed token's K and V, all layers and local heads
    page_bytes: int
    pages_total: int
    pages_free: int
    tokens: int  # resident tokens, pruned ones included
    bytes: int  # bytes of their blocks: pages, scales and table rows
    packed_tokens: int
    packed_bytes: int
    block_ids_total: int = 0  # every block takes one; they may run out before the pages
    block_ids_free: int = 0
    blocks_by_format: dict[str, int] = field(default_factory=dict)  # "bf16", "k4v4", "k8v4+k4v2" -> blocks
    tokens_by_tier: dict[str, int] = field(default_factory=dict)  # "bf16", "high", "low", "pruned"
    occupancy: float | None = None  # share of the packed pages' token slots that hold a token
    compactions: int = 0  # blocks compacted since start
    compaction_ms: float = 0.0  # host time of compactions: their launches on a GPU, the work itself on a CPU
    evicted_blocks: int = 0
    demoted_blocks: int = 0  # moves to a lower format since start
    recomputed_tokens: int = 0  # prompt tokens since start that were computed again because they had been dropped
    running_share: float = 1.0  # share of the memory that running requests may hold when a prompt needs an eviction
    host_bytes: int = 0  # bytes of host memory in use
    host_bytes_total: int = 0  # 0: there is no host tier
    host_blocks: int = 0  # blocks in host memory
    host_saved_bytes: int = 0  # bytes copied to the host since start
    host_loaded_bytes: int = 0  # bytes copied back since start, those of loads under way included
    host_arrived_bytes: int = 0  # bytes of finished loads
    host_load_ms: float = 0.0  # time of these on the device, from first copy to last page; 0 on the CPU
    host_loading: int = 0  # loads under way
    canceled_loads: int = 0  # loads since start whose memory was needed before they began; their prompts ask again
    transfer_ms: float = 0.0  # host time of both, like `compaction_ms`
    disk_bytes: int = 0  # bytes of files, also of earlier weights; with a storage backend, what this server wrote
    disk_bytes_total: int = 0  # 0: there is no disk tier, or a storage backend
    disk_blocks: int = 0  # blocks in files of these weights; with a storage backend, those that this server wrote
    disk_written_bytes: int = 0  # since start
    disk_read_bytes: int = 0  # since start
    disk_damaged: int = 0  # damaged records since start

    @property
    def ratio_body(self) -> float | None:
        """Compression of packed blocks alone; None if nothing is packed."""
        return _ratio(self.bf16_token_bytes * self.packed_tokens, self.packed_bytes)

    @property
    def ratio(self) -> float | None:
        """Compression of everything resident, the uncompressed ends of sequences included."""
        return _ratio(self.bf16_token_bytes * self.tokens, self.bytes)

    @property
    def bytes_per_token(self) -> float | None:
        return _ratio(self.bytes, self.tokens)

    @property
    def bytes_per_token_body(self) -> float | None:
        return _ratio(self.packed_bytes, self.packed_tokens)

    @property
    def tier_shares(self) -> dict[str, float]:
        """`tokens_by_tier` as shares of 1."""
        total = sum(self.tokens_by_tier.values())
        return {tier: n / total for tier, n in self.tokens_by_tier.items()} if total else {}

    def to_dict(self) -> dict[str, Any]:
        """All counts and all derived figures, JSON-ready."""
        derived = ("ratio_body", "ratio", "bytes_per_token", "bytes_per_token_body", "tier_shares")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> KvcStats:
        """Inverse of `to_dict`. Drops derived figures and unknown fields, and makes text printable, because `data` may
        come from any server. TypeError or ValueError for a value that should be a number but is not."""
        return cls(**{f.name: _READ[str(f.type)](data[f.name]) for f in fields(cls) if f.name in data})

    def log_line(self) -> str:
        """One short part of SGLang's own prefill and decode log lines."""
        begun = self.tokens and not self.packed_tokens  # the ratio of an open block would look like a loss
        parts = ["kvc: nothing packed yet" if begun else f"kvc: {times(self.ratio)} (body {times(self.ratio_body)})"]
        if self.bytes_per_token is not None and not begun:
            parts.append(f"{self.bytes_per_token:.0f} B/token")
        parts.append(f"pages free {self.pages_free}/{self.pages_total}")
        if self.tier_shares:
            parts.append("tiers " + " ".join(f"{t} {100 * s:.0f}%" for t, s in self.tier_shares.items()))
        if self.occupancy is not None:
            parts.append(f"occupancy {self.occupancy:.2f}")
        parts.append(f"compacted {self.compactions} blocks")
        if self.running_share < 1:
            parts.append(f"running share {self.running_share:.2f}")
        if self.demoted_blocks:
            parts.append(f"demoted {self.demoted_blocks} blocks")
        if self.host_bytes_total:
            used, total = self.host_bytes / 1e9, self.host_bytes_total / 1e9
            moved = f"{self.host_saved_bytes / 1e9:.1f} GB out, {self.host_loaded_bytes / 1e9:.1f} GB back"
            rate = f" at {self.host_arrived_bytes / self.host_load_ms / 1e6:.1f} GB/s" if self.host_load_ms else ""
            parts.append(f"host {used:.1f} of {total:.1f} GB, {moved}{rate}")
        moved = f"{self.disk_written_bytes / 1e9:.1f} GB written, {self.disk_read_bytes / 1e9:.1f} GB read"
        if self.disk_bytes_total:
            parts.append(f"disk {self.disk_bytes / 1e9:.1f} of {self.disk_bytes_total / 1e9:.1f} GB, {moved}")
        elif self.disk_written_bytes or self.disk_read_bytes:
            parts.append(f"storage backend {moved}")
        return ", ".join(parts)


@dataclass(frozen=True)
class HeadMap:
    """Share of the tokens of all packed blocks that each head of each layer keeps, `[layer][head]`, 0 to 1."""

    kept: list[list[float]]
    high: list[list[float]]  # share of all tokens in the high tier; the rest of `kept` is low
    blocks: int  # packed blocks

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> HeadMap:
        """Inverse of `to_dict`. KeyError, TypeError or ValueError unless both tables are numbers of equal shape."""
        kept, high = ([[float(x) for x in row] for row in data[name]] for name in ("kept", "high"))
        if len({len(row) for row in kept}) > 1 or [len(row) for row in kept] != [len(row) for row in high]:
            raise ValueError("the tables of heads have rows of different lengths")
        if not all(math.isfinite(x) for row in (*kept, *high) for x in row):
            raise ValueError("a share is not a finite number")
        return cls(kept, high, int(data["blocks"]))

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.kept), len(self.kept[0]) if self.kept else 0


def times(ratio: float | None) -> str:
    """3.117 -> '3.12x', None -> '-'."""
    return "-" if ratio is None else f"{ratio:.2f}x"


def printable(text: str) -> str:
    """`text` without control characters, which a terminal would execute."""
    return "".join(c for c in str(text) if c.isprintable())


# Readers of `KvcStats` fields, by type.
_READ: dict[str, Callable[[Any], Any]] = {
    "str": printable,
    "int": int,
    "float": float,
    "float | None": lambda value: None if value is None else float(value),
    "dict[str, int]": lambda counts: {printable(name): int(n) for name, n in counts.items()},
}


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if numerator and denominator else None
