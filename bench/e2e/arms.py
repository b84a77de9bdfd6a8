"""Names and options of the compared servers: stock SGLang with several attention backends and KV dtypes, and ours.

A stock server is named after its KV dtype and, unless it uses the first of `--stock-backends`, its attention backend:
`bf16`, `fp8_e4m3`, `bf16_flashinfer`, `fp8_e4m3_fa3_p128`. The baseline is always the fastest stock server of a dtype
in the same result file.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

BF16, FP8 = "bf16", "fp8_e4m3"
HICACHE = f"{FP8}_hicache"


class Backend(NamedTuple):
    """An attention backend of stock SGLang and its page size in tokens."""

    name: str
    page_size: int = 1

    @classmethod
    def parse(cls, text: str) -> Backend:
        """`fa3`, or `fa3:128` with pages of 128 tokens."""
        name, _, page_size = text.partition(":")
        return cls(name, int(page_size or 1))

    @property
    def options(self) -> list[str]:
        return ["--attention-backend", self.name, "--page-size", str(self.page_size)]

    def __str__(self) -> str:
        return self.name if self.page_size == 1 else f"{self.name}_p{self.page_size}"


def stock(server: str, backends: str, options: list[str]) -> dict[str, list[str]]:
    """Name -> options of one stock server per backend. The server with the first backend is named `server`."""
    parsed = [Backend.parse(text) for text in backends.split(",")]
    names = [server if i == 0 else f"{server}_{backend}" for i, backend in enumerate(parsed)]
    return {n: ["--kv-backend", "default", *b.options, *options] for n, b in zip(names, parsed, strict=True)}


def select(servers: dict, only: str) -> dict:
    """Servers named in the comma-separated list `only`; all servers if it is empty."""
    wanted = [name for name in only.split(",") if name]
    if unknown := set(wanted) - set(servers):
        raise SystemExit(f"error: no server {', '.join(sorted(unknown))}; there are {', '.join(servers)}")
    return {name: server for name, server in servers.items() if not wanted or name in wanted}


def is_variant(server: str, base: str) -> bool:
    """Whether `server` differs from `base` at most in its attention backend."""
    suffix = server.removeprefix(base)
    return server.startswith(base) and (
        not suffix or (suffix[0] == "_" and suffix[1:].split("_")[0] not in ("free", "hicache"))
    )


def fastest(runs: dict[str, dict], base: str, point: str, speed: Callable[[dict], float]) -> str | None:
    """Name of the run at `point` with the highest `speed` among the variants of the stock server `base`."""
    names = [f"{server}.{point}" for server in servers_at(runs, point) if is_variant(server, base)]
    return max(names, key=lambda name: speed(runs[name]), default=None)


def servers_at(runs: dict[str, dict], point: str) -> list[str]:
    return [name.removesuffix(f".{point}") for name in runs if name.endswith(f".{point}")]


def describe(options: list[str]) -> str:
    """Description of a stock server from its options: `stock bf16, fa3, pages of 128 tokens`."""
    pairs = dict(pairwise(options))
    text = [f"stock {pairs.get('--kv-cache-dtype', BF16)}", pairs.get("--attention-backend", "default attention")]
    if (page_size := pairs.get("--page-size", "1")) != "1":
        text.append(f"pages of {page_size} tokens")
    if "--enable-hierarchical-cache" in options:
        text.append(f"hierarchical cache of {pairs['--hicache-size']} GB on the host")
    if "--cuda-graph-backend-prefill=disabled" in options:
        text.append("no prefill graphs")
    return ", ".join(text)
