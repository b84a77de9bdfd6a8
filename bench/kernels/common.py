"""Device facts, timing, workloads and result files of the kernel benchmarks."""

from __future__ import annotations

import datetime
import json
import pathlib
import time
from dataclasses import dataclass

import torch

from bench.common import Score, command_line
from bench.revision import RESULTS as ALL_RESULTS
from bench.revision import card, commit
from kvc_kernels import layout
from kvc_kernels.formats import BF16, FORMATS
from kvc_kernels.layout import BlockFormat, PoolLayout, choose_page_bytes
from tests.support.random_store import random_store

RESULTS = ALL_RESULTS / "kernels"


def device_facts() -> dict:
    if not torch.cuda.is_available():
        return {"name": "CPU"}
    p = torch.cuda.get_device_properties(0)
    return {"name": p.name, "sms": p.multi_processor_count, "memory_gib": round(p.total_memory / 2**30, 1)}


class Results:
    """A result file. It is rewritten after every row, so that an interrupted run keeps its rows.

    `bench/scoreboard.py` collects `scores` (name -> fields of a `Score`). Each GPU model has its own file:
    `decode_targets.json` becomes `decode_targets_h200.json` on an H200.
    """

    def __init__(self, path: str | pathlib.Path, **facts):
        self.path, self.facts = pathlib.Path(path), facts
        if self.path.parent == RESULTS:
            self.path = self.path.with_stem(f"{self.path.stem}_{card(device_facts()['name'])}")
        self.rows: list[dict] = []
        self.scores: dict[str, dict] = {}

    def add(self, *rows: dict) -> None:
        self.rows += rows
        self.write()

    def score(self, scores: dict[str, Score | tuple]) -> None:
        self.scores |= {name: Score(*score).to_dict() for name, score in scores.items()}
        self.write()

    def write(self) -> None:
        facts = device_facts()
        body = {
            "command": command_line(),
            "commit": commit(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "device": facts["name"],
            "device_facts": facts,
            "torch": torch.__version__,
            **self.facts,
            "scores": self.scores,
            "rows": self.rows,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(body, indent=1) + "\n")

    def show(self) -> None:
        for name, score in self.scores.items():
            print(f"{name:32} {score['value']:8.4f} {score['unit']}")
        print(f"written: {self.path}", flush=True)


class Budget:
    """Time limit that records the names of skipped points."""

    def __init__(self, seconds: float):
        self.end, self.skipped = time.monotonic() + seconds, []

    def exceeded(self, point: str) -> bool:
        """Whether time has run out, so that `point` is skipped."""
        exceeded = time.monotonic() > self.end
        if exceeded:
            self.skipped.append(point)
        return exceeded

    def show(self) -> None:
        if self.skipped:
            print(f"skipped for lack of time: {', '.join(self.skipped)}")


def table(rows: list[dict], columns: dict[str, str]) -> str:
    """Text table with a header and one line per row. `columns`: key -> format. Missing values stay blank."""
    lines = [list(columns)]
    lines += [["" if r.get(c) is None else format(r[c], f) for c, f in columns.items()] for r in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join("  ".join(x.rjust(w) for x, w in zip(line, widths)) for line in lines)


def time_graph(fn, *, inner: int = 10, outer: int = 7) -> float:
    """Median milliseconds per call in replays of a CUDA graph of `fn(0)` .. `fn(inner - 1)`."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        fn(0)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(inner):
            fn(i)
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(outer):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) / inner)
    return sorted(times)[len(times) // 2]


def copy_bandwidth() -> float:
    """Bytes read and written per second of a large device-to-device copy: the better of a copy and an add kernel."""
    a = torch.empty(1 << 31, dtype=torch.uint8, device="cuda").random_(0, 256)
    b = torch.empty_like(a)
    a4, b4 = a.view(torch.int32), b.view(torch.int32)
    best = float("inf")
    for fn in (lambda: b.copy_(a), lambda: torch.add(a4, 1, out=b4)):
        fn()
        for _ in range(10):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            fn()
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end))
    return 2 * a.numel() / (best * 1e-3)


@dataclass(frozen=True)
class Workload:
    """Requests and their stored tokens. `ladder`: one packed block format, like "k4v4" or "k8v4+k4v2". `kept`: see
    `counts`."""

    ladder: str
    kept: str = "full"
    block_tokens: int = 256
    page_bytes: int = 0
    batch: int = 64
    tokens: int = 8192
    heads: int = 8
    group: int = 4
    head_dim: int = 128
    layers: int = 1  # more than one if a single layer would stay in the L2 cache between runs
    long: int = 0  # tokens of the first request; 0: `tokens`
    window: int = -1  # tokens before its own that a query attends to; -1: all

    @property
    def formats(self):
        return [FORMATS[x] for x in self.ladder.split("+")]

    def block_formats(self) -> tuple[BlockFormat, ...]:
        f = self.formats
        if f[0] is BF16:
            return (BlockFormat(BF16),)
        return (BlockFormat(BF16), BlockFormat(f[0], f[1] if len(f) > 1 else None))

    def layout(self) -> PoolLayout:
        size = self.page_bytes or choose_page_bytes(
            self.formats,
            head_dim=self.head_dim,
            block_tokens=self.block_tokens,
            has_scores=False,
            whole=self.kept == "full",
        )
        return PoolLayout(self.layers, self.heads, self.head_dim, self.block_tokens, size)

    def counts(self, blocks: int, gen: torch.Generator) -> torch.Tensor:
        """Kept tokens per tier, int64 `[blocks, L, H, 2]`, as `kept` says: "full", "uniform:M:W[:R]" (M +- W percent of
        P, rounded up to R tokens), "mix:M:W:m:w" (both tiers uniform), or "heads:A:B" (from A percent in the first head
        to B percent in the last)."""
        kind, *args = self.kept.split(":")
        p = self.block_tokens
        out = torch.zeros((blocks, self.layers, self.heads, 2), dtype=torch.int64)

        def uniform(mean: str, width: str) -> torch.Tensor:
            u = torch.rand((blocks, self.layers, self.heads), generator=gen) * 2 - 1
            return ((float(mean) + float(width) * u) * p / 100).round().long().clamp(0, p)

        if kind == "full":
            out[..., 0] = p
        elif kind == "uniform":
            n, grain = uniform(*args[:2]), int(args[2]) if len(args) > 2 else 1
            out[..., 0] = ((n + grain - 1) // grain * grain).clamp(max=p)
        elif kind == "mix":
            out[..., 0], out[..., 1] = uniform(*args[:2]), uniform(*args[2:])
        elif kind == "heads":
            share = torch.linspace(float(args[0]), float(args[1]), self.heads)
            out[..., 0] = (share * p / 100).round().long()
        else:
            raise ValueError(self.kept)
        return out

    def build(self, *, batch: int | None = None, tokens: int | None = None, seed: int = 0, format_id: int = 1):
        """Store, row_blocks int32 `[B, NB]`, seq_lens int32 `[B]`, and stored bytes of one layer without slack."""
        batch, tokens = batch or self.batch, tokens or self.tokens
        gen = torch.Generator().manual_seed(seed)
        lens = torch.full((batch,), tokens)
        lens[0] = self.long or tokens
        p = self.block_tokens
        nb = -(-lens // p)
        n = int(nb.sum())
        block_formats = self.block_formats()
        format_ids = torch.full((n,), min(format_id, len(block_formats) - 1))
        ids = 1 + torch.randperm(n, generator=gen)
        rows = torch.zeros((batch, int(nb.max())), dtype=torch.int32)
        for i, blocks in enumerate(ids.split(nb.tolist())):
            rows[i, : len(blocks)] = blocks
            if lens[i] % p:
                format_ids[blocks[-1] - 1] = 0
        counts = self.counts(n, gen)
        store = random_store(self.layout(), block_formats, format_ids, counts, device="cuda", seed=seed)
        plain = format_ids == 0
        plain_tokens = int(plain.sum()) * p - int(((-lens) % p).sum())
        size = self.stored_bytes(counts[~plain], plain_tokens)
        if 0 <= self.window < tokens:
            size = size * (self.window + 1) // tokens
        return store, rows.cuda(), lens.int().cuda(), size

    def stored_bytes(self, counts: torch.Tensor, plain_tokens: int) -> int:
        """Bytes that an ideal kernel reads for one layer: codes, metadata, headers, table entries and counts."""
        layout = self.layout()
        total = plain_tokens * self.heads * 4 * self.head_dim
        for side, f in enumerate(self.formats if len(counts) else []):
            page = layout.page(f)
            token_bytes = page.key_row_bytes + page.value_row_bytes + 4 * page.value_groups
            n = counts[:, 0, :, side]
            total += int(n.sum()) * token_bytes + int((-(-n // page.tokens)).sum()) * 4
            total += len(counts) * self.heads * (layout.header_bytes + 2)
        return total


def cold_layers(size: int) -> int:
    """Number of layers of `size` bytes to cycle through, so that none stays in the L2 cache (60 MB)."""
    return max(1, min(32, -(-240_000_000 // size)))


def page_bytes_for(fmt: str, tokens: int, head_dim: int = 128) -> int:
    """Size of a page with room for exactly `tokens` tokens of `fmt`."""
    return layout.page_bytes_for(FORMATS[fmt], tokens, head_dim=head_dim, has_scores=False)
