"""The compared servers: stock SGLang with each attention backend and KV dtype, and ours.

A stock server is named by its KV dtype, and by its attention backend unless that is the first of `--stock-backends`:
`bf16`, `fp8_e4m3`, `bf16_flashinfer`, `fp8_e4m3_fa3_p128`. The baseline is always the fastest stock server of a dtype
in the same result file; `described` names it.
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
    """name -> options of one stock server for each of `backends`; the first one's name is `server` alone."""
    parsed = [Backend.parse(text) for text in backends.split(",")]
    names = [server if i == 0 else f"{server}_{backend}" for i, backend in enumerate(parsed)]
    return {n: ["--kv-backend", "default", *b.options, *options] for n, b in zip(names, parsed, strict=True)}


def chosen(servers: dict, only: str) -> dict:
    """The servers named in `only`, separated by commas; all of them if it is empty."""
    wanted = [name for name in only.split(",") if name]
    if unknown := set(wanted) - set(servers):
        raise SystemExit(f"error: no server {', '.join(sorted(unknown))}; there are {', '.join(servers)}")
    return {name: server for name, server in servers.items() if not wanted or name in wanted}


def is_variant(server: str, of: str) -> bool:
    """Whether `server` is `of` with some attention backend (and not, say, with a hierarchical cache)."""
    special = ("free", "hicache")
    rest = server.removeprefix(of)
    return server.startswith(of) and (not rest or (rest[0] == "_" and rest[1:].split("_")[0] not in special))


def fastest(runs: dict[str, dict], of: str, point: str, speed: Callable[[dict], float]) -> str | None:
    """The name of the run at `point` whose `speed` is highest, of the stock server `of` with any attention backend."""
    names = [f"{server}.{point}" for server in servers_at(runs, point) if is_variant(server, of)]
    return max(names, key=lambda name: speed(runs[name]), default=None)


def servers_at(runs: dict[str, dict], point: str) -> list[str]:
    return [name.removesuffix(f".{point}") for name in runs if name.endswith(f".{point}")]


def described(options: list[str]) -> str:
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
