"""A long prefix to host memory and back: time relative to the bus, and the slowdown of concurrent decoding.

    python -m bench.kernels.swap [--tokens 102400] [--layers 32]

8 KV heads, head_dim 128, blocks of 128 tokens in k4v4: an 8B model's cache. Blocks go through the runtime's operation
queue, as in a server. The floor is one copy of the same bytes between page-locked and device memory, in large pieces,
in the same run. `*_host_ms` is the host's time for all launches.

Two CUDA graphs run during a load: decode attention of 64 requests of 8192 tokens over another store (`attention`), and
one layer of an 8B model, which adds the four matrix products (`layer`). `load` moves blocks back, `dma` only copies the
same bytes into the buffers. Concurrent times are means over all runs during the load.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from bench.common import Score
from sglang_kvc.cache.build import build_runtime
from sglang_kvc.cache.runtime import Runtime
from sglang_kvc.options.config import KvcConfig

from .common import RESULTS, Results, Workload, table

HEADS, DIM, P = 8, 128, 128
BATCH = 64  # uncompressed blocks at a time
REQUESTS, TOKENS, HIDDEN, INNER = 64, 8192, 4096, 14336
GROUP = 5  # runs of a graph
COLUMNS = {"what": "", "beside": "", "load_of_bus": ".3f", "alone_ms": ".4f", "beside_ms": ".4f", "slowdown": ".3f"}


def packed_blocks(runtime: Runtime, n: int) -> np.ndarray:
    """`n` packed blocks with random bytes in their pages."""
    blocks: list[int] = []
    while len(blocks) < n:
        some = runtime.take([0] * min(BATCH, n - len(blocks)))
        runtime.flush()
        runtime.queue_due(np.asarray(some))
        runtime.flush()
        blocks += some
    runtime.settle()
    runtime.store.pages.random_(0, 256)
    return np.array(blocks)


def timed(launch, stream: torch.cuda.Stream) -> tuple[float, float]:
    """Milliseconds from the launch until `stream` is done, and milliseconds of the host."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    launch()
    launched = time.perf_counter() - began
    stream.synchronize()
    return 1e3 * (time.perf_counter() - began), 1e3 * launched


def bus(num_bytes: int, to_host: bool) -> float:
    """Milliseconds of one copy of `num_bytes` bytes in pieces of 64 MiB; the best of three."""
    piece = 64 << 20
    host = torch.empty(piece, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(piece, dtype=torch.uint8, device="cuda")
    best = float("inf")
    for _ in range(3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for at in range(0, num_bytes, piece):
            n = min(piece, num_bytes - at)
            (host if to_host else device)[:n].copy_((device if to_host else host)[:n], non_blocking=True)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return 1e3 * best


def graph(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """`run`, GROUP times."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    made = torch.cuda.CUDAGraph()
    with torch.cuda.graph(made):
        for _ in range(GROUP):
            run()
    made.replay()
    return made


class Work:
    """Work that runs during a load, in its own store."""

    def __init__(self):
        self.store, self.rows, self.lens, _ = Workload("k4v4", block_tokens=P, batch=REQUESTS, tokens=TOKENS).build()
        self.q = torch.randn((REQUESTS, HEADS * 4, DIM), device="cuda", dtype=torch.bfloat16)
        sizes = ((HIDDEN, HIDDEN + 2 * HEADS * DIM), (HIDDEN, HIDDEN), (HIDDEN, 2 * INNER), (INNER, HIDDEN))
        new = {"device": "cuda", "dtype": torch.bfloat16}
        self.products = [(torch.randn((REQUESTS, k), **new), torch.randn((n, k), **new).t()) for k, n in sizes]

    def graphs(self) -> dict[str, torch.cuda.CUDAGraph]:
        from kvc_kernels.decode.attention import DecodeAttention

        op = DecodeAttention(self.store, max_batch=REQUESTS, max_blocks=self.rows.shape[1], query_heads=HEADS * 4)
        op.plan(self.rows, self.lens)
        self.op = op  # graphs hold no reference to the buffers that they read

        def attention() -> None:
            op.run(0, self.q, scale=DIM**-0.5)

        def layer() -> None:
            attention()
            for a, b in self.products:
                a @ b

        return {"attention": graph(attention), "layer": graph(layer)}


def beside(work: torch.cuda.CUDAGraph, launch: Callable[[], tuple] | None = None) -> tuple[float, float]:
    """Milliseconds of one run of `work` while what `launch` starts is under way, and of that (0 with none).

    `launch` returns two events, at the begin and the end. The device always has the next runs queued, but for the time
    that the launch takes on the host, which does not count."""
    torch.cuda.synchronize()
    work.replay()
    ends = launch() if launch else None
    marks: list[torch.cuda.Event] = []
    while len(marks) < (6 if ends else 40) or (ends and not ends[1].query()):
        work.replay()
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
        if len(marks) > 2:
            marks[-3].synchronize()
    torch.cuda.synchronize()
    while_under_way = marks[: -2 if ends else None]  # the last ones were queued before the end was seen
    each = while_under_way[0].elapsed_time(while_under_way[-1]) / (len(while_under_way) - 1) / GROUP
    return each, ends[0].elapsed_time(ends[1]) if ends else 0.0


class Prefix:
    """Blocks in host memory, and their way back."""

    def __init__(self, tokens: int, layers: int):
        self.n, plain = tokens // P, 4 * layers * HEADS * DIM * P
        size = int(self.n * plain / 2.5)
        config = KvcConfig(block_size=P, window=0, host_memory=size)
        self.runtime = build_runtime(
            config, num_bytes=size + BATCH * 2 * plain, layers=layers, heads=HEADS, head_dim=DIM, dtype=torch.bfloat16,
            device="cuda",
        )  # fmt: skip
        began = time.perf_counter()
        self.runtime.attach_host_tier()
        self.page_lock_s = time.perf_counter() - began
        self.tier, self.transfers = self.runtime.host_tier, self.runtime.host_tier.transfers
        self.blocks = packed_blocks(self.runtime, self.n)
        self.ids = np.empty(0, dtype=np.int64)

    def save(self) -> tuple[float, float]:
        """Milliseconds of the blocks' way to the host, and of the host."""
        self.tier.free(self.ids)
        self.ids = self.tier.save(self.blocks)
        self.num_bytes = int((self.tier.units[self.ids] >= 0).sum()) * self.tier.memory.unit_bytes
        return timed(self.runtime.flush, self.transfers.save_stream)

    def queue_load(self) -> None:
        self.runtime.free(self.blocks)
        self.blocks = self.tier.load(self.ids).blocks
        self.tier.loading.clear()

    def load(self) -> tuple[float, float]:
        """The same back."""
        self.queue_load()
        return timed(self.runtime.flush, self.transfers.move_stream)

    def launch(self) -> tuple:
        """Events at the begin and the end of a load."""
        self.queue_load()
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        ends[0].record(self.transfers.load_stream)
        self.runtime.flush()
        ends[1].record(self.transfers.move_stream)
        return tuple(ends)

    def copy(self) -> tuple:
        """The bus's part of a load alone."""
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        units = self.tier.units[self.ids]
        units = units[:, : int((units >= 0).sum(1).max())]
        rows = self.transfers._rows(self.transfers.load_buffers[0][0], units.shape[1])
        with torch.cuda.stream(self.transfers.load_stream):
            ends[0].record()
            for at in range(0, len(units), len(rows)):
                part = units[at : at + len(rows)]
                self.transfers._copy(part, rows[: len(part)], to_host=False)
            ends[1].record()
        return tuple(ends)


def median(values) -> float:
    return float(np.median(list(values)))


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--tokens", type=int, default=102_400)
    p.add_argument("--layers", type=int, default=32)
    p.add_argument("--times", type=int, default=5)
    args = p.parse_args(argv)
    results = Results(RESULTS / "swap.json", note=__doc__.split("\n\n", 2)[-1].strip())
    prefix = Prefix(args.tokens, args.layers)
    rows = []
    for turn in range(args.times + 1):  # the first one compiles kernels
        saved, back = prefix.save(), prefix.load()
        floors = bus(prefix.num_bytes, True), bus(prefix.num_bytes, False)
        row = {
            "what": "alone", "tokens": args.tokens, "gb": prefix.num_bytes / 1e9, "save_ms": saved[0],
            "load_ms": back[0], "save_floor_ms": floors[0], "load_floor_ms": floors[1], "save_host_ms": saved[1],
            "load_host_ms": back[1], "page_lock_s": prefix.page_lock_s,
        }  # fmt: skip
        if turn:
            rows.append(row)
            results.add(row)
    floor = median(r["load_floor_ms"] for r in rows)
    work = Work()
    graphs = work.graphs()
    alone = {name: beside(g)[0] for _ in range(2) for name, g in graphs.items()}
    found = []
    for kind, launch in (("dma", prefix.copy), ("load", prefix.launch)):
        for name, g in graphs.items():
            both = [beside(g, launch) for _ in range(args.times)]
            run, load = median(b[0] for b in both), median(b[1] for b in both)
            row = {"what": name, "beside": kind, "alone_ms": alone[name], "beside_ms": run}
            found.append(row | {"slowdown": run / alone[name], "load_of_bus": load / floor})
            results.add(found[-1])
    print(table(found, COLUMNS))
    slowdown = {r["what"]: r["slowdown"] for r in found if r["beside"] == "load"}
    save = [r["save_ms"] / r["save_floor_ms"] for r in rows]
    load = [r["load_ms"] / r["load_floor_ms"] for r in rows]
    unit, baseline = "of the time of a plain copy", "one copy of the same bytes over the same bus"
    beside_unit, n = "of the time alone", len(rows)
    results.score(
        {
            "agents.swap_in_of_pcie": Score(median(load), unit, baseline=baseline, n=n),
            "agents.swap_out_of_pcie": Score(median(save), unit, baseline=baseline, n=n),
            "agents.attention_beside_swap": Score(
                slowdown["attention"], beside_unit, baseline="decode attention alone", n=n
            ),
            "agents.decode_slowdown": Score(
                slowdown["layer"], beside_unit, baseline="one layer's decode step alone", n=n
            ),
        }
    )  # fmt: skip
    results.show()


if __name__ == "__main__":
    main()
