"""Decode attention compared with other projects in one run. Each kernel is checked against float64.

    python -m bench.rivals.decode --oscar CHECKOUT --diffkv CHECKOUT [--shapes 64x8192,16x32768] [--seconds 300]

8 KV heads, GQA 4, head_dim 128. OSCAR runs with 2 bits and the fastest number of parts. DiffKV runs with our formats
without pruning, and with its mix (35 +- 12 % high K8V4, 40 +- 12 % low K4V2, by head). Ours has the same formats in the
server's layout.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import torch

from bench.kernels import decode as ours
from bench.kernels.common import RESULTS, Budget, Results, Workload, cold_layers, copy_bandwidth, table, time_graph
from kvc_kernels.decode.attention import Tuning

from . import diffkv, oscar, reference

HEADS, GROUP, DIM = 8, 4, 128
OURS = ("k8v8", "k8v4", "k4v4", "k4v2", "k2v2", "mix")
# Name -> (high, low) bits of keys and values in DiffKV.
DIFFKV = {
    "k8v8": ((8, 8), (8, 8)), "k8v4": ((8, 4), (8, 4)), "k4v4": ((4, 4), (4, 4)), "k4v2": ((4, 2), (4, 2)),
    "mix": ((8, 4), (4, 2)),
}  # fmt: skip
CHECKED = 9000  # tokens of the check; enough that DiffKV splits a request into parts, as in the timed runs
MAX_ERROR = 0.02  # bound of the relative error of a correct kernel; outputs and partial outputs are bf16
COLUMNS = {"kernel": "", "store": "", "batch": "", "tokens": "", "ms": ".4f", "of_copy": ".1%", "error": ".4f"}
COLUMNS["parts"] = ""


def ragged(batch: int, layers: int, heads: int, tokens: int) -> torch.Tensor:
    """Random numbers of tokens, int64 `[B, L, H, 2]`: 35 +- 12 % high and 40 +- 12 % low."""
    u = torch.rand((batch, layers, heads, 2)) * 2 - 1
    return ((torch.tensor([0.35, 0.40]) + 0.12 * u) * tokens).round().long()


def workloads() -> dict[str, Workload]:
    workloads_by_name = ours.workloads(128, 0)
    return {name: workloads_by_name.get(name) or Workload(name, "full", 128) for name in OURS}


def of_oscar(module: ModuleType, batch: int, tokens: int, layers: int) -> oscar.Case:
    return oscar.Case(module, batch, tokens, HEADS, GROUP, DIM, layers, "cuda")


def of_diffkv(module: ModuleType, name: str, batch: int, tokens: int, layers: int) -> diffkv.Case:
    high, low = (diffkv.Page(*bits) for bits in DIFFKV[name])
    counts = torch.tensor([tokens, 0]).expand(batch, layers, HEADS, 2).contiguous()
    counts = ragged(batch, layers, HEADS, tokens) if name == "mix" else counts
    return diffkv.Case(module, high, low, counts, GROUP, "cuda")


def timed(make: Callable, name: str, store: str, batch: int, tokens: int, bandwidth: float, parts=(None,)) -> dict:
    """Row of one kernel and shape. The kernel is first checked with few requests, then timed with the fastest of
    `parts`.

    Raises:
        ValueError: the kernel is wrong.
    """
    error = reference.error(make(2, CHECKED, 2))
    if not error < MAX_ERROR:
        raise ValueError(f"wrong by {error:.3g}")
    layers = cold_layers(batch * tokens * HEADS * DIM // 2)  # the size for 2 bits, the smallest format
    case, best = make(batch, tokens, layers), {}
    for n in parts:
        if n is not None:
            case.split(n)
        best[n] = time_graph(case.run, inner=max(10, layers))
    n = min(best, key=best.get)
    row = dict(kernel=name, store=store, batch=batch, tokens=tokens, ms=best[n], bytes=case.bytes, error=error)
    return row | dict(parts=n, of_copy=case.bytes / (best[n] * 1e-3) / bandwidth)


def rivals(args: argparse.Namespace) -> list[tuple[str, str, Callable, tuple]]:
    """(kernel, format, function from batch, tokens and layers to a case, numbers of parts to try) of each rival."""
    out = []
    if args.oscar:
        module = oscar.load(args.oscar)
        out.append(("oscar", "int2", lambda *shape: of_oscar(module, *shape), oscar.SPLITS))
    if args.diffkv:
        with ThreadPoolExecutor(len(DIFFKV)) as pool:
            built = pool.map(lambda bits: diffkv.load(args.diffkv, *bits, GROUP), DIFFKV.values())
            for name, module in zip(DIFFKV, built):
                make = lambda *shape, name=name, module=module: of_diffkv(module, name, *shape)  # noqa: E731
                out.append(("diffkv", name, make, (None,)))
    return out


def scores(rows: list[dict]) -> dict[str, tuple[float, str]]:
    """Speedup of each of our formats over OSCAR's 2 bits and over the same format of DiffKV."""
    times = {(r["kernel"], r["store"], r["batch"], r["tokens"]): r["ms"] for r in rows if "ms" in r}
    out: dict[str, tuple[float, str]] = {}
    for store in OURS:
        for kernel, rival_store in (("oscar", "int2"), ("diffkv", store)):
            pairs = [
                (times[kernel, rival_store, b, t], ms)
                for (k, s, b, t), ms in times.items()
                if (k, s) == ("ours", store) and (kernel, rival_store, b, t) in times
            ]
            if pairs:
                unit = f"x, worst of {len(pairs)} shapes"
                out[f"decode.vs_{kernel}.{store}"] = (min(a / b for a, b in pairs), unit)
    return out


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--oscar", type=Path, help="a checkout of FutureMLS-Lab/OSCAR")
    ap.add_argument("--diffkv", type=Path, help="a checkout of zyqCSL/DiffKV")
    ap.add_argument("--shapes", default="64x8192,16x32768")
    ap.add_argument("--seconds", type=float, default=300)
    ap.add_argument("--jobs", type=int, default=8)
    ap.add_argument("--out", default=str(RESULTS / "rivals.json"))
    args = ap.parse_args(argv)
    args.shapes = [tuple(map(int, s.split("x"))) for s in args.shapes.split(",")]
    return args


def main() -> None:
    args = arguments()
    budget, bandwidth, others = Budget(args.seconds), copy_bandwidth(), rivals(args)
    results = Results(args.out, copy_bytes_per_s=bandwidth)
    results.add(*ours.check(list(workloads().items()), args.jobs, Tuning()))
    for batch, tokens in args.shapes:
        for kernel, store, make, parts in others:
            if budget.exceeded(f"{kernel} {store} {batch}x{tokens}"):
                continue
            try:
                results.add(timed(make, kernel, store, batch, tokens, bandwidth, parts))
            except Exception as e:
                print(f"{kernel} {store} {batch}x{tokens}: {type(e).__name__} {str(e)[-300:]}", flush=True)
            torch.cuda.empty_cache()
        for name, w in workloads().items():
            if not budget.exceeded(f"ours {name} {batch}x{tokens}"):
                row = ours.ours(name, Workload(**{**vars(w), "batch": batch, "tokens": tokens}), bandwidth, Tuning())
                results.add(row | dict(kernel="ours", store=name))
    results.score(scores(results.rows))
    print(table([r for r in results.rows if "kernel" in r], COLUMNS))
    budget.show()
    results.show()


if __name__ == "__main__":
    main()
