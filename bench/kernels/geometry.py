"""Decode attention by block size, page size, tile and token counts.

    python -m bench.kernels.geometry SUITE [--out FILE.json] [--jobs 12] [--seconds 220]

Parallel processes first compile each distinct kernel and check it against float64 on a small store, which fills the
compile cache. All points are then timed one by one. The scoreboard's figures come from `bench.kernels.decode`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import asdict, replace

import torch

from kvc_kernels.decode.attention import DecodeAttention, Tuning
from tests.support.random_store import reference_decode

from .common import RESULTS, Budget, Results, Workload, copy_bandwidth, page_bytes_for, time_graph


def suite_tune() -> list[tuple[Workload, Tuning, int]]:
    """Points (workload, tuning, columns; 0: default) over engines and launch parameters, with full blocks."""
    out = []
    gluon, triton = Tuning("gluon"), Tuning("triton")
    sizes = [(f, n) for f in ("k8v8", "k8v4", "k4v4") for n in (32, 64)] + [("k4v2", 64), ("k2v2", 64)]
    for name, tokens in sizes:
        w = Workload(name, page_bytes=page_bytes_for(name, tokens))
        for t in (gluon, replace(gluon, max_registers=168), replace(gluon, tile=32), triton):
            out.append((w, t, 0))
    k4 = Workload("k4v4", page_bytes=page_bytes_for("k4v4", 64))
    out += [(k4, gluon, c) for c in (99, 297, 445)]
    out += [(k4, replace(gluon, max_registers=r), 0) for r in (128, 200)]
    out += [(k4, replace(gluon, tile=32, max_registers=r), 0) for r in (128, 160)]
    out += [(k4, replace(triton, warps=2, tile=128, plain_tile=32), 0)]
    bf = Workload("bf16", page_bytes=8192)
    out += [(bf, t, 0) for t in (gluon, replace(gluon, plain_tile=32), triton, replace(triton, plain_tile=32))]
    return out


def suite_geometry() -> list[tuple[Workload, Tuning, int]]:
    """Points over block and page sizes, ragged counts and two tiers."""
    out = []
    default = Tuning()
    for tokens in (32, 64, 128):
        size = page_bytes_for("k4v4", tokens)
        for p in (128, 256, 512):
            out.append((Workload("k4v4", block_tokens=p, page_bytes=size), default, 0))
            out.append((Workload("k4v4", "uniform:50:12", p, size), default, 0))
    for grain in (16, 32, 64):
        for tokens in (32, 64):
            out.append((Workload("k4v4", f"uniform:50:12:{grain}", 256, page_bytes_for("k4v4", tokens)), default, 0))
    for tile in (16, 32):
        out.append((Workload("k4v4", "uniform:50:12", 256, page_bytes_for("k4v4", 32)), replace(default, tile=tile), 0))
    out.append((Workload("k4v4", "uniform:50:0", 256, page_bytes_for("k4v4", 64)), default, 0))
    for size in (page_bytes_for("k8v4", 16), page_bytes_for("k8v4", 32), page_bytes_for("k8v4", 48),
                 page_bytes_for("k8v4", 64)):  # fmt: skip
        for p in (256, 512):
            out.append((Workload("k8v4+k4v2", "mix:35:12:40:12", p, size), default, 0))
    mix = Workload("k8v4+k4v2", "mix:35:12:40:12", 256, page_bytes_for("k8v4", 32))
    out.append((mix, replace(default, tile=32), 0))
    d64 = Workload("k4v4", page_bytes=page_bytes_for("k4v4", 64, 64), head_dim=64)
    out += [(d64, default, 0), (d64, replace(default, tile=128), 0)]
    return out


def suite_main() -> list[tuple[Workload, Tuning, int]]:
    """Points of the targets: every format with full blocks, half pruned, two tiers, head_dim 64; both engines."""
    gluon, triton = Tuning("gluon"), Tuning("triton")
    out = []
    for name, tokens in (("k8v8", 32), ("k8v4", 32), ("k4v4", 64), ("k4v2", 64), ("k2v2", 64)):
        out.append((Workload(name, page_bytes=page_bytes_for(name, tokens)), gluon, 0))
    k4 = Workload("k4v4", page_bytes=page_bytes_for("k4v4", 64))
    half = replace(k4, kept="uniform:50:12")
    mix = Workload("k8v4+k4v2", "mix:35:12:40:12", page_bytes=page_bytes_for("k8v4", 32))
    big = replace(mix, page_bytes=page_bytes_for("k8v4", 64))
    d64 = replace(k4, head_dim=64, page_bytes=page_bytes_for("k4v4", 64, 64))
    bf = Workload("bf16", page_bytes=8192)
    out += [(k4, replace(gluon, max_registers=168), 0), (k4, triton, 0), (half, gluon, 0), (half, triton, 0)]
    out += [(mix, gluon, 0), (big, gluon, 0), (replace(big, block_tokens=512), gluon, 0), (mix, triton, 0)]
    out += [(d64, gluon, 0), (bf, gluon, 0), (bf, triton, 0), (replace(k4, batch=16, tokens=32768), gluon, 0)]
    return out


def suite_ragged() -> list[tuple[Workload, Tuning, int]]:
    """Points of partly filled blocks, for both engines and both shapes of the targets."""
    kept = [("k8v4+k4v2", "mix:35:12:40:12")] + [("k4v4", k) for k in ("uniform:50:12", "heads:10:90", "heads:50:50")]
    out = [(Workload(name, k, 128), Tuning(engine), 0) for name, k in kept for engine in ("triton", "gluon")]
    return out + [(replace(w, batch=16, tokens=32768), t, c) for w, t, c in out[:4]]


SUITES = {"main": suite_main, "tune": suite_tune, "geometry": suite_geometry, "ragged": suite_ragged}


def check(w: Workload, t: Tuning) -> float:
    """Relative error against float64 on a small store with a bf16 tail. The output buffer starts as NaN."""
    tokens = 2 * w.block_tokens + 37
    store, rows, lens, _ = w.build(batch=2, tokens=tokens, seed=int(time.time()) % 10007)
    q = torch.randn((2, w.heads * w.group, w.head_dim), device="cuda").bfloat16()
    op = DecodeAttention(
        store, max_batch=2, max_blocks=rows.shape[1], query_heads=q.shape[1], tuning=t, columns=4, window=w.window
    )
    op.plan(rows, lens)
    out = torch.full_like(q, float("nan"))
    scale = w.head_dim**-0.5
    op.run(0, q, scale=scale, out=out)
    ref = reference_decode(store, 0, q, rows, lens, scale=scale, window=w.window)
    return ((out.double().cpu() - ref).norm() / ref.norm()).item()


def measure(w: Workload, tunings: list[tuple[Tuning, int]], bandwidth: float) -> list[dict]:
    store, rows, lens, size = w.build()
    q = torch.randn((w.batch, w.heads * w.group, w.head_dim), device="cuda").bfloat16()
    out = []
    for t, items in tunings:
        op = DecodeAttention(
            store, max_batch=w.batch, max_blocks=rows.shape[1], query_heads=q.shape[1], tuning=t,
            columns=items or None, window=w.window,
        )  # fmt: skip
        op.plan(rows, lens)
        y = torch.empty_like(q)
        ms = time_graph(
            lambda i, op=op, y=y: op.run(i % w.layers, q, scale=w.head_dim**-0.5, out=y), inner=max(10, w.layers)
        )
        plan_ms = time_graph(lambda i, op=op: op.plan(rows, lens))
        row = {
            "workload": asdict(w), "tuning": asdict(t), "items": op._plan.columns, "ms": ms, "plan_ms": plan_ms,
            "bytes": size, "of_copy": size / (ms * 1e-3) / bandwidth, "nan": bool(y.isnan().any()),
            "tokens_a_page": [w.layout().page(f).tokens for f in w.formats],
        }  # fmt: skip
        out.append(row)
        print(line(row), flush=True)
    return out


def line(r: dict) -> str:
    w, t = r["workload"], r["tuning"]
    tune = f"{t['engine']:6s} w{t['warps']} t{t['tile']} r{t['max_registers'] or '-'} p{t['plain_tile']}"
    workload = f"{w['ladder']:10s} {w['kept']:16s} P{w['block_tokens']} D{w['head_dim']} {w['batch']}x{w['tokens']}"
    return (
        f"{workload} G{w['group']} T{r['tokens_a_page']} {tune} columns {r['items']}: {r['ms'] * 1e3:7.1f} us"
        f"  {100 * r['of_copy']:5.1f} % of copy  plan {r['plan_ms'] * 1e3:.1f} us{'  NaN!' if r['nan'] else ''}"
    )


def main() -> None:
    ap = argparse.ArgumentParser()
    ap.add_argument("suite", choices=SUITES)
    ap.add_argument("--out", default="", help="default: bench/results/kernels/geometry_SUITE.json")
    ap.add_argument("--seconds", type=float, default=220)
    ap.add_argument("--jobs", type=int, default=12)
    ap.add_argument("--shard", help="i/n: only check this part (for the parallel first pass)")
    args = ap.parse_args()
    points = SUITES[args.suite]()
    small = {}
    for w, t, _ in points:
        small.setdefault((replace(w, batch=2, tokens=0, long=0, layers=2), t), None)
    if args.shard:
        i, n = map(int, args.shard.split("/"))
        for w, t in list(small)[i::n]:
            try:
                err = check(w, t)
                bad = "" if err < 4e-3 else "  WRONG"
                print(f"check {w.ladder} P{w.block_tokens} D{w.head_dim} {t}: {err:.1e}{bad}", flush=True)
            except Exception as e:
                print(
                    f"check {w.ladder} P{w.block_tokens} {t}: FAILED {type(e).__name__} {str(e)[-300:]}",
                    flush=True,
                )
        return
    started = time.time()
    jobs = [
        subprocess.Popen([sys.executable, "-m", "bench.kernels.geometry", args.suite, "--shard", f"{i}/{args.jobs}"])
        for i in range(min(args.jobs, len(small)))
    ]
    for job in jobs:
        job.wait()
    print(f"checked {len(small)} kernels in {time.time() - started:.0f} s", flush=True)
    bandwidth = copy_bandwidth()
    print(f"copy {bandwidth / 1e12:.2f} TB/s on {torch.cuda.get_device_name()}", flush=True)
    grouped: dict[Workload, list] = {}
    for w, t, items in points:
        grouped.setdefault(w, []).append((t, items))
    results = Results(args.out or RESULTS / f"geometry_{args.suite}.json", copy_bytes_per_s=bandwidth)
    budget = Budget(args.seconds - (time.time() - started))
    for w, tunings in grouped.items():
        if budget.exceeded(f"{w.ladder} {w.kept} P{w.block_tokens}"):
            continue
        try:
            results.add(*measure(w, tunings, bandwidth))
        except Exception as e:
            print(f"{w}: FAILED {type(e).__name__} {str(e)[-300:]}", flush=True)
        torch.cuda.empty_cache()
    print("\n".join(line(r) for r in sorted(results.rows, key=lambda r: r["ms"])))
    budget.show()
    results.show()


if __name__ == "__main__":
    main()
