"""Decode attention compared with the fastest stock kernel in the same run: the scoreboard's `decode.*` figures.

    python -m bench.kernels.decode targets|grid|uneven [--seconds 220] [--block 128] [--page-tokens 0]
        [--engine auto|triton|gluon] [--out FILE]

The default is 8 KV heads, GQA 4, head_dim 128. `targets` compares every format at 64 x 8K and 16 x 32K with the fastest
stock kernels over bf16 and fp8_e4m3. `grid` compares k4v4 with stock over bf16 for 1 .. 256 requests of 1K .. 128K
tokens. `uneven` varies lengths, heads, groups and head_dim, and compares the time per stored byte with an even case; it
also compares a layer with a window with a layer of as many tokens. Each kernel is first checked against float64 on
fresh random bytes. FlashInfer compiles at its first use, so run `bench.kernels.baselines --warm` first.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import time
from dataclasses import replace

import torch

from bench.common import Score
from kvc_kernels.decode.attention import Tuning

from . import baselines, geometry
from .common import RESULTS, Budget, Results, Workload, cold_layers, copy_bandwidth, page_bytes_for, table

SHAPES = ((64, 8192), (16, 32768))
BATCHES, TOKENS, MAX_TOKENS = (1, 4, 16, 64, 256), (1024, 4096, 8192, 32768, 131072), 1 << 20
MAX_ERROR = 4e-3  # relative error of a correct kernel; rounding to bf16 alone gives 1.1e-3
SLACK_MS = 0.003
WINDOW = "window of"  # prefix of the names of layers with a window, which do not count in scores


def workloads(block: int, page_tokens: int) -> dict[str, Workload]:
    """Name -> workload. `page_tokens`: tokens per page of the (high) format; 0: pages as the server chooses them."""

    def make(spec: str, kept: str = "full") -> Workload:
        size = page_bytes_for(spec.split("+")[0], page_tokens) if page_tokens else 0
        return Workload(spec, kept, block, size)

    out = {name: make(name) for name in ("k8v8", "k8v4", "k4v4", "k4v2")}
    out["k4v4_half"] = make("k4v4", "uniform:50:12")
    out["mix"] = make("k8v4+k4v2", "mix:35:12:40:12")
    out["mix_256"] = replace(out["mix"], block_tokens=256)
    return out


def targets(args) -> list[tuple[str, Workload]]:
    return [
        (name, replace(w, batch=batch, tokens=tokens))
        for batch, tokens in SHAPES
        for name, w in workloads(args.block, args.page_tokens).items()
    ]


def grid(args) -> list[tuple[str, Workload]]:
    k4 = workloads(args.block, args.page_tokens)["k4v4"]
    return [
        # Several layers, so that a small cache does not stay in L2.
        ("k4v4", replace(k4, batch=b, tokens=t, layers=cold_layers(b * t * 8 * 132)))
        for t in TOKENS
        for b in BATCHES
        if b * t <= MAX_TOKENS
    ]


def uneven(args) -> list[tuple[str, Workload]]:
    """Workloads named `case/even`. The time per byte of a case is compared with that of its even case."""
    k4 = workloads(args.block, args.page_tokens)["k4v4"]
    size = page_bytes_for("k4v4", args.page_tokens, 64) if args.page_tokens else 0
    narrow = replace(k4, head_dim=64, page_bytes=size)
    size = page_bytes_for("k4v4", args.page_tokens, 256) if args.page_tokens else 0
    wide = replace(k4, head_dim=256, page_bytes=size, heads=4)
    lengths = replace(k4, tokens=2048, layers=4)
    out = [("base/base", k4), ("lengths even/lengths even", lengths)]
    out += [("one 64K of 64/lengths even", replace(lengths, tokens=1024, long=65536))]
    out += [("heads even/heads even", replace(k4, kept="heads:50:50"))]
    out += [("heads 10..90 %/heads even", replace(k4, kept="heads:10:90"))]
    out += [(f"group {g}/base", replace(k4, group=g)) for g in (1, 6, 7, 8, 16)]
    out += [("head_dim 64/base", narrow), ("head_dim 256/base", wide)]
    thousand = replace(k4, tokens=1024, layers=4)
    return [*out, ("1K even/1K even", thousand), (f"{WINDOW} 1K of 8K/1K even", replace(k4, window=1023))]


SUITES = {"targets": targets, "grid": grid, "uneven": uneven}


def check(points: list[tuple[str, Workload]], jobs: int, tuning: Tuning) -> list[dict]:
    """Compile each kernel and compare it with float64, in processes that fill the compile cache.

    Raises:
        SystemExit: a kernel is wrong.
    """
    small = dict.fromkeys(
        replace(w, batch=2, tokens=0, long=0, layers=2, window=min(w.window, 99)) for _, w in points
    )
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(jobs, len(small)), context) as pool:
        errors = pool.map(geometry.check, small, [tuning] * len(small))
        rows = [dict(case="check", ladder=w.ladder, group=w.group, error=e) for w, e in zip(small, errors)]
    bad = [r for r in rows if not r["error"] < MAX_ERROR]
    if bad:
        raise SystemExit(f"wrong results, nothing timed: {bad}")
    return rows


def ours(name: str, w: Workload, bandwidth: float, tuning: Tuning) -> dict:
    row = geometry.measure(w, [(tuning, 0)], bandwidth)[0]
    torch.cuda.empty_cache()
    figures = {x: row[x] for x in ("ms", "plan_ms", "bytes", "of_copy", "nan", "workload")}
    return dict(case="ours", name=name, batch=w.batch, tokens=w.tokens, **figures)


def run(args, results: Results, budget: Budget, bandwidth: float) -> None:
    points = SUITES[args.suite](args)
    tuning = Tuning(engine=args.engine)
    results.add(*check(points, args.jobs, tuning))
    kinds = {"targets": ("bf16", "fp8_e4m3"), "grid": ("bf16",), "uneven": ()}[args.suite]
    shapes = dict.fromkeys((w.batch, w.tokens) for _, w in points)
    for batch, tokens in shapes:
        if budget.exceeded(f"{batch}x{tokens}"):
            continue
        quick = args.suite == "grid"
        for kv in kinds:
            stock = baselines.measure(batch, tokens, 128, kv, bandwidth, quick=quick, library=args.stock)
            results.add(*(dict(case="stock", name=r.pop("kernel"), **r) for r in stock))
        for name, w in points:
            if (w.batch, w.tokens) == (batch, tokens):
                try:
                    results.add(ours(name, w, bandwidth, tuning))
                except Exception as e:
                    print(f"{name} {batch}x{tokens}: {type(e).__name__} {str(e)[-300:]}", flush=True)


def best_stock(rows: list[dict]) -> dict[tuple[str, int, int], float]:
    """(kv, batch, tokens) -> milliseconds of the fastest stock kernel."""
    out: dict[tuple[str, int, int], float] = {}
    for r in rows:
        if r["case"] == "stock":
            key = r["kv"], r["batch"], r["tokens"]
            out[key] = min(out.get(key, r["ms"]), r["ms"])
    return out


def fastest(rows: list[dict], kv: str) -> str:
    """Description of the stock kernels that are fastest for at least one shape."""
    best = best_stock(rows)
    stock = [r for r in rows if r["case"] == "stock" and r["kv"] == kv]
    names = {r["name"] for r in stock if r["ms"] == best[kv, r["batch"], r["tokens"]]}
    return f"stock {kv}: {', '.join(sorted(names))}"


def ratios_of(rows: list[dict]) -> list[dict]:
    """Our rows with ratios to the fastest stock kernel of the same shape, or to the even case."""
    stock, out = best_stock(rows), []
    valid = [r for r in rows if r["case"] == "ours" and not r["nan"]]
    per_byte = {r["name"].split("/")[0]: r["ms"] / r["bytes"] for r in valid}
    for r in valid:
        line = {k: r[k] for k in ("name", "batch", "tokens", "ms", "of_copy")}
        for kv, short in (("bf16", "bf16"), ("fp8_e4m3", "fp8")):
            other = stock.get((kv, r["batch"], r["tokens"]))
            if other:
                line |= {f"{short}_ms": other, f"vs_{short}": other / r["ms"]}
        case, _, even = r["name"].partition("/")
        if even in per_byte:
            line |= {"name": case, "per_byte": per_byte[case] / per_byte[even]}
        out.append(line)
    return out


def scores(suite: str, rows: list[dict]) -> dict[str, Score]:
    """Scores: the worst ratio over all measured shapes."""
    lines, out = ratios_of(rows), {}
    if suite == "targets":
        for name in dict.fromkeys(r["name"] for r in lines):
            shapes = [r for r in lines if r["name"] == name]
            for kv, dtype in (("bf16", "bf16"), ("fp8", "fp8_e4m3")):
                ratios = [r[f"vs_{kv}"] for r in shapes if f"vs_{kv}" in r]
                if ratios:
                    unit = f"x fastest stock {kv}, worst of {len(ratios)} shapes"
                    out[f"decode.vs_{kv}.{name}"] = Score(min(ratios), unit, fastest(rows, dtype))
            if name == "k8v4":
                share = min(r["of_copy"] for r in shapes)
                out["decode.bandwidth.k8v4"] = Score(share, "share of copy bandwidth", "a device copy")
    if suite == "grid":
        ratios = [1 / r["vs_bf16"] for r in lines if "vs_bf16" in r]
        if ratios:
            unit = f"time over the fastest stock bf16, worst of {len(ratios)} points"
            out["decode.worst_vs_bf16"] = Score(max(ratios), unit, fastest(rows, "bf16"))
    if suite == "uneven":
        ratios = [r["per_byte"] for r in lines if "per_byte" in r and not r["name"].startswith(WINDOW)]
        if ratios:
            unit = "time per byte over the even case"
            out["decode.worst_uneven"] = Score(max(ratios), unit, "even lengths and heads")
    return out


COLUMNS = {
    "name": "", "batch": "", "tokens": "", "ms": ".4f", "of_copy": ".1%", "bf16_ms": ".4f", "vs_bf16": ".2f",
    "fp8_ms": ".4f", "vs_fp8": ".2f", "per_byte": ".2f",
}  # fmt: skip


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("suite", choices=SUITES)
    ap.add_argument("--out", default="", help="default: bench/results/kernels/decode_SUITE.json")
    ap.add_argument("--seconds", type=float, default=220)
    ap.add_argument("--stock", default="", choices=("", "fa3", "flashinfer"), help="stock library; default: all")
    ap.add_argument("--jobs", type=int, default=12)
    ap.add_argument("--block", type=int, default=128)
    ap.add_argument("--page-tokens", type=int, default=0)
    ap.add_argument("--engine", choices=("auto", "triton", "gluon"), default="auto", help="auto: as served")
    args = ap.parse_args(argv)
    form = "" if args.engine == "auto" else "_" + args.engine
    args.out = args.out or str(RESULTS / f"decode_{args.suite}{form}.json")
    return args


def main() -> None:
    args = arguments()
    budget, began = Budget(args.seconds), time.monotonic()
    bandwidth = copy_bandwidth()
    results = Results(args.out, copy_bytes_per_s=bandwidth)
    run(args, results, budget, bandwidth)
    results.score(scores(args.suite, results.rows))
    lines = ratios_of(results.rows)
    print(table(lines, COLUMNS))
    if args.suite == "grid":
        slow = [r for r in lines if "bf16_ms" in r and r["ms"] > max(1.03 * r["bf16_ms"], r["bf16_ms"] + SLACK_MS)]
        print(f"points slower than bf16 by more than 3 % and 3 us: {len(slow)}")
    print(f"copy {bandwidth / 1e12:.2f} TB/s, {time.monotonic() - began:.0f} s")
    budget.show()
    results.show()


if __name__ == "__main__":
    main()
