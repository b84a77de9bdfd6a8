"""Transfer of a long prefix to host memory and back: time relative to the bus, and slowdown of concurrent decoding.

    python -m bench.kernels.swap [--tokens 102400] [--layers 32]

The cache is that of an 8B model: 8 KV heads, head_dim 128, blocks of 128 tokens in k4v4. Blocks go through the
runtime's operation queue, as in a server. The floor is a copy of the same bytes between page-locked and device memory
in large pieces, in the same run. `*_host_ms` is the host's time for all launches.

Two CUDA graphs run concurrently with a load: decode attention of 64 requests of 8192 tokens over another store
(`attention`), and one layer of an 8B model, which adds four matrix products (`layer`). `load` moves blocks back to the
device. `dma` only copies the same bytes to the buffers. Concurrent times are means over all runs during the load.
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
BATCH = 64  # maximum number of uncompressed blocks
REQUESTS, TOKENS, HIDDEN, INNER = 64, 8192, 4096, 14336
REPEATS = 5  # runs of the work in one graph
STEP = 6  # graphs that take about as long as one decode step of 32 layers
COLUMNS = {"what": "", "beside": "", "load_of_bus": ".3f", "alone_ms": ".4f", "beside_ms": ".4f", "slowdown": ".3f"}


def packed_blocks(runtime: Runtime, n: int) -> np.ndarray:
    """`n` packed blocks with random bytes in their pages."""
    blocks: list[int] = []
    while len(blocks) < n:
        batch = runtime.take([0] * min(BATCH, n - len(blocks)))
        runtime.flush()
        runtime.queue_due(np.asarray(batch))
        runtime.flush()
        blocks += batch
    runtime.settle()
    runtime.store.pages.random_(0, 256)
    return np.array(blocks)


def timed(launch, stream: torch.cuda.Stream) -> tuple[float, float]:
    """Milliseconds until `stream` is idle after `launch`, and milliseconds of `launch` on the host."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    launch()
    launched = time.perf_counter() - began
    stream.synchronize()
    return 1e3 * (time.perf_counter() - began), 1e3 * launched


def bus(num_bytes: int, to_host: bool) -> float:
    """Milliseconds of one copy of `num_bytes` bytes in pieces of 64 MiB, best of three."""
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
    """CUDA graph of `run`, REPEATS times."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for _ in range(REPEATS):
            run()
    captured.replay()
    return captured


class DecodeWork:
    """Decoding that runs concurrently with a load, over a store of its own."""

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


class Transfer:
    """A transfer and its start and end events. `launch` launches its next part and returns whether it was the last."""

    def __init__(self, launch: Callable[[], bool], first: torch.cuda.Stream, last: torch.cuda.Stream):
        self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.launch, self.last, self.launched = launch, last, False
        self.start.record(first)
        self.advance()

    def advance(self) -> None:
        if not self.launched and self.launch():
            self.end.record(self.last)
            self.launched = True

    @property
    def finished(self) -> bool:
        return self.launched and self.end.query()


def concurrent_ms(work: torch.cuda.CUDAGraph, begin: Callable[[], Transfer] | None = None) -> tuple[float, float]:
    """Mean milliseconds of one run of `work` during a transfer, and milliseconds of the transfer (0 without one).

    As in a server, the next part of the transfer is launched once in each decode step (`STEP` graphs), and one more
    step is queued on the device by then.
    """
    torch.cuda.synchronize()
    for _ in range(STEP):
        work.replay()
    transfer = begin() if begin else None
    marks: list[torch.cuda.Event] = []
    while len(marks) < 8 * STEP or (transfer and not transfer.finished):
        work.replay()
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
        if len(marks) > STEP:
            marks[-STEP - 1].synchronize()
        if transfer and transfer.finished:
            break
        if transfer and len(marks) % STEP == 0:
            transfer.advance()
    torch.cuda.synchronize()
    during = marks[: -STEP if transfer else None]  # the last ones may have run after the transfer
    run_ms = during[0].elapsed_time(during[-1]) / (len(during) - 1) / REPEATS
    return run_ms, transfer.start.elapsed_time(transfer.end) if transfer else 0.0


class Prefix:
    """Packed blocks of a prefix that move between device and host memory."""

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
        """Move the blocks to the host; return milliseconds of the transfer and of the launches."""
        self.tier.free(self.ids)
        self.ids = self.tier.save(self.blocks)
        self.num_bytes = int((self.tier.units[self.ids] >= 0).sum()) * self.tier.memory.unit_bytes
        return timed(self.runtime.flush, self.transfers.save_stream)

    def queue_load(self) -> None:
        self.runtime.free(self.blocks)
        self.blocks = self.tier.load(self.ids).blocks
        self.tier.loading.clear()

    def load(self) -> tuple[float, float]:
        """Move the blocks back; return milliseconds of the transfer and of the launches."""
        self.queue_load()

        def flush() -> None:
            while not self.flush():
                pass

        return timed(flush, self.transfers.move_stream)

    def flush(self) -> bool:
        """Launch what one flush may of a load; return whether nothing is left."""
        self.runtime.flush()
        return not self.transfers.fills

    def begin_load(self) -> Transfer:
        self.queue_load()
        return Transfer(self.flush, self.transfers.load_stream, self.transfers.move_stream)

    def begin_copy(self) -> Transfer:
        """Only the copies of a load over the bus."""
        units = self.tier.units[self.ids]
        units = units[:, : int((units >= 0).sum(1).max())]
        rows = self.transfers._rows(self.transfers.load_buffers[0][0], units.shape[1])

        def launch() -> bool:
            with torch.cuda.stream(self.transfers.load_stream):
                for at in range(0, len(units), len(rows)):
                    part = units[at : at + len(rows)]
                    self.transfers._copy(part, rows[: len(part)], to_host=False)
            return True

        return Transfer(launch, self.transfers.load_stream, self.transfers.load_stream)


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
        saved, loaded = prefix.save(), prefix.load()
        floors = bus(prefix.num_bytes, True), bus(prefix.num_bytes, False)
        row = {
            "what": "alone", "tokens": args.tokens, "gb": prefix.num_bytes / 1e9, "save_ms": saved[0],
            "load_ms": loaded[0], "save_floor_ms": floors[0], "load_floor_ms": floors[1], "save_host_ms": saved[1],
            "load_host_ms": loaded[1], "page_lock_s": prefix.page_lock_s,
        }  # fmt: skip
        if turn:
            rows.append(row)
            results.add(row)
    floor = median(r["load_floor_ms"] for r in rows)
    work = DecodeWork()
    graphs = work.graphs()
    alone = {name: concurrent_ms(g)[0] for _ in range(2) for name, g in graphs.items()}  # the first round warms up
    concurrent = []
    for kind, begin in (("dma", prefix.begin_copy), ("load", prefix.begin_load)):
        for name, g in graphs.items():
            times = [concurrent_ms(g, begin) for _ in range(args.times)]
            run, load = (median(x) for x in zip(*times))
            row = {"what": name, "beside": kind, "alone_ms": alone[name], "beside_ms": run}
            concurrent.append(row | {"slowdown": run / alone[name], "load_of_bus": load / floor})
            results.add(concurrent[-1])
    print(table(concurrent, COLUMNS))
    beside = {r["what"]: r for r in concurrent if r["beside"] == "load"}
    save = [r["save_ms"] / r["save_floor_ms"] for r in rows]
    load = [r["load_ms"] / r["load_floor_ms"] for r in rows]
    unit, baseline = "of the time of a plain copy", "one copy of the same bytes over the same bus"
    n = len(rows)

    def slowdown(what: str, baseline: str) -> Score:
        row = beside[what]
        text = f"of the time alone, beside a load of {row['load_of_bus']:.2f} of a plain copy"
        return Score(row["slowdown"], text, baseline=baseline, n=n)

    results.score(
        {
            "agents.swap_in_alone_of_pcie": Score(median(load), unit, baseline=baseline, n=n),
            "agents.swap_out_of_pcie": Score(median(save), unit, baseline=baseline, n=n),
            "agents.attention_beside_swap": slowdown("attention", "decode attention alone"),
            "agents.layer_slowdown": slowdown("layer", "one layer's decode step alone"),
        }
    )  # fmt: skip
    results.show()


if __name__ == "__main__":
    main()
