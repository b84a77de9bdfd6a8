"""Ways of dealing the decode work to programs, side by side in one run: the two-tier mix and uneven heads above all.

    python -m bench.kernels.decode_variants [--variants base,tiles,..] [--seconds 95] [--jobs 14] [--no-stock]

Every variant's kernel is compiled and held against float64 first (processes that fill the compile cache), and at full
size against the answers of `base`. Times are medians over graph replays; the last column is the plan of a step.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import time
from dataclasses import replace

import torch

from kvc_kernels.ops.decode_attention_triton import DecodeAttention, Tuning
from kvc_kernels.ops.decode_share_triton import ShareDecodeAttention
from kvc_kernels.store import PageStore
from kvc_kernels.testing import reference_decode

from . import baselines
from .common import RESULTS, Results, copy_bandwidth, page_bytes_for, time_graph
from .decode import workloads

BLOCK, MAX_BATCH = 128, 64
WRONG = 6e-3  # longer rows than elsewhere: more tokens average out, and the rounding of bf16 weighs more


def by_bytes(op: DecodeAttention) -> None:
    """Weights of the plan by the bytes of a block, as they were."""
    d, p = op.store.layout.head_dim, op.store.layout.block_tokens
    cost = [p * max(d * (f.key_bits + f.value_bits) / 8, 0.8 * d) for f, _ in op._plan.classes]
    op._plan.weights.copy_(torch.tensor(cost, device=op.store.device))


VARIANTS = {
    "base": (DecodeAttention, {"even": True, "early": False}, by_bytes),
    "tiles": (DecodeAttention, {"even": True, "early": False}, None),
    "tiles+early": (DecodeAttention, {"even": True}, None),
    "halves": (DecodeAttention, {"early": False}, None),
    "halves+early": (DecodeAttention, {}, None),
    "halves s2": (DecodeAttention, {"tuning": Tuning(stages=2)}, None),
    "halves s4": (DecodeAttention, {"tuning": Tuning(stages=4)}, None),
    "share": (ShareDecodeAttention, {"even": True}, None),
    "share+halves": (ShareDecodeAttention, {}, None),
    "exact+halves": (ShareDecodeAttention, {"exact": True}, None),
}


def make(variant: str, store, **kw):
    cls, extra, change = VARIANTS[variant]
    op = cls(store, **kw, **extra)
    if change:
        change(op)
    return op


def points() -> dict[str, object]:
    w = workloads(BLOCK, 0)
    half = w["k4v4_half"]
    return {
        "mix": w["mix"],
        "mix 16x32K": replace(w["mix"], batch=16, tokens=32768),
        "mix P256": replace(w["mix"], block_tokens=256),
        "mix, pages 64": replace(w["mix"], page_bytes=page_bytes_for("k8v4", 64)),
        "heads even": replace(w["k4v4"], kept="heads:50:50"),
        "heads 10..90": replace(w["k4v4"], kept="heads:10:90"),
        "half": half,
        "k4v4": w["k4v4"],
        "k8v4": w["k8v4"],
        "k4v2": w["k4v2"],
        "half 4x4K": replace(half, batch=4, tokens=4096),
    }


def check(w, variant: str) -> float:
    """Relative error against float64 with a bf16 tail, over NaN, at two counts of columns; compiles what is timed."""
    worst = 0.0
    lens = 11 * w.block_tokens + 37
    store, rows, seq_lens, _ = w.build(batch=2, tokens=lens, seed=int(time.time()) % 10007)
    seq_lens[1] = 3 * w.block_tokens
    q = torch.randn((2, w.heads * w.group, w.head_dim), device="cuda").bfloat16()
    scale = w.head_dim**-0.5
    ref = reference_decode(store, 0, q, rows, seq_lens, scale=scale)
    for columns in (3, None):
        sizes = dict(max_batch=MAX_BATCH, max_blocks=rows.shape[1], query_heads=q.shape[1])
        op = make(variant, store, columns=columns, **sizes)
        op.plan(rows, seq_lens)
        op._part_o.fill_(float("nan"))
        out = torch.full_like(q, float("nan"))
        op.run(0, q, scale=scale, out=out)
        error = ((out.double().cpu() - ref).norm() / ref.norm()).item()
        worst = max(worst, error) if error == error else float("inf")
    return worst


def check_all(args) -> set[str]:
    """Names of variants that answer right everywhere."""
    jobs = {}
    for variant in args.variants:
        for w in points().values():
            # Lengths and counts are data and do not change the kernel, nor do weights.
            if VARIANTS[variant][2] is None or "+" in w.ladder:
                jobs[w.ladder, w.layout().page_bytes, variant] = w, variant
    context = multiprocessing.get_context("spawn")
    bad = set()
    with concurrent.futures.ProcessPoolExecutor(args.jobs, context) as pool:
        futures = {pool.submit(check, *job): job for job in jobs.values()}
        for future, (w, variant) in futures.items():
            try:
                error = future.result()
            except Exception as e:
                print(f"{variant} {w.ladder} {w.kept}: {type(e).__name__} {str(e)[-400:]}", flush=True)
                error = float("inf")
            if not error < WRONG:
                print(f"WRONG: {variant} {w.ladder} {w.kept} error {error}", flush=True)
                bad.add(variant)
    return set(args.variants) - bad


def measure(name: str, w, variants: list[str]) -> list[dict]:
    store, rows, lens, size = w.build()
    q = torch.randn((w.batch, w.heads * w.group, w.head_dim), device="cuda").bfloat16()
    scale, first, out = w.head_dim**-0.5, None, []
    for variant in variants:
        op = make(variant, store, max_batch=MAX_BATCH, max_blocks=rows.shape[1], query_heads=q.shape[1])
        op.plan(rows, lens)
        y = torch.empty_like(q)
        ms = time_graph(lambda i, op=op, y=y: op.run(i % w.layers, q, scale=scale, out=y), inner=max(10, w.layers))
        op.run(0, q, scale=scale, out=y)
        first = y.double() if first is None else first
        apart = ((y.double() - first).norm() / first.norm()).item()
        again = all(torch.equal(op.run(0, q, scale=scale), y) for _ in range(3))
        row = dict(variant=variant, name=name, ms=ms, bytes=size, apart=apart)
        if not apart < WRONG or not again:
            print(f"WRONG at full size: {variant} {name} {apart}, same bits again: {again}", flush=True)
        out.append(row)
    return out


def plan_ms(variant: str, layers: int = 32, device: str = "cuda") -> float:
    """Milliseconds of a step's plan for the mix in a model of so many layers; pages are not needed for that."""
    w = replace(points()["mix"], layers=layers)
    n, gen = w.batch * w.tokens // w.block_tokens, torch.Generator().manual_seed(0)
    store = PageStore.create(
        w.layout(), w.rungs(), num_pages=4, num_blocks=n + 1, dtype=torch.bfloat16, device=device
    )  # fmt: skip
    store.rung[1:] = 1
    store.counts[1:] = w.counts(n, gen).to(torch.int16).to(device)
    rows = (1 + torch.randperm(n, generator=gen)).view(w.batch, -1).int().to(device)
    lens = torch.full((w.batch,), w.tokens, dtype=torch.int32, device=device)
    op = make(
        variant, store, max_batch=MAX_BATCH, max_blocks=rows.shape[1], query_heads=w.heads * w.group, columns=132
    )  # fmt: skip
    op.plan(rows, lens)
    return time_graph(lambda i: op.plan(rows, lens))


def stock(batch: int, tokens: int, bandwidth: float) -> float:
    rows = baselines.measure(batch, tokens, 128, "bf16", bandwidth, quick=True)
    return min((r["ms"] for r in rows), default=float("nan"))


def warm() -> None:
    baselines.measure(2, 64, 128, "bf16", 1.0, quick=True)


def show(rows: list[dict], stocks: dict[str, float], plans: dict[str, float]) -> None:
    names = list(dict.fromkeys(r["name"] for r in rows))
    at = {(r["variant"], r["name"]): r for r in rows}
    print(f"bf16 FlashInfer: {', '.join(f'{k} {v:.4f} ms' for k, v in stocks.items())}")
    print("us".ljust(17) + "".join(n.rjust(14) for n in names) + "heads ratio".rjust(14) + "plan, 32 layers".rjust(18))
    for variant in dict.fromkeys(r["variant"] for r in rows):
        cells, plan = [], plans.get(variant, float("nan"))
        for n in names:
            r = at.get((variant, n))
            if r is None:
                cells.append("".rjust(14))
                continue
            versus = stocks.get("16x32768" if "16x" in n else "64x8192", float("nan")) if "4x4K" not in n else None
            cells.append((f"{r['ms'] * 1e3:.1f}" + (f" ({versus / r['ms']:.2f}x)" if versus else "")).rjust(14))
        pair = [at.get((variant, n)) for n in ("heads 10..90", "heads even")]
        per = [r["ms"] / r["bytes"] for r in pair if r]
        ratio = f"{per[0] / per[1]:.3f}" if len(per) == 2 else ""
        print(variant.ljust(17) + "".join(cells) + ratio.rjust(14) + f"{plan * 1e3:.1f}".rjust(18), flush=True)


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--variants", default=",".join(VARIANTS))
    ap.add_argument("--seconds", type=float, default=95)
    ap.add_argument("--jobs", type=int, default=14)
    ap.add_argument("--no-stock", action="store_true")
    ap.add_argument("--out", default=str(RESULTS / "decode_variants.json"))
    args = ap.parse_args()
    args.variants = args.variants.split(",")
    began = time.monotonic()
    warming = multiprocessing.get_context("spawn").Process(target=warm)
    if not args.no_stock:
        warming.start()
    right = check_all(args)
    variants = [v for v in args.variants if v in right]
    print(f"right: {', '.join(variants)}; {time.monotonic() - began:.0f} s", flush=True)
    bandwidth = copy_bandwidth()
    results, stocks = Results(args.out, copy_bytes_per_s=bandwidth), {}
    if not args.no_stock:
        warming.join(max(1.0, args.seconds / 2 - (time.monotonic() - began)))
        if warming.is_alive():
            print("stock kernels are still compiling: left out", flush=True)
            warming.kill()
        else:
            for batch, tokens in ((64, 8192), (16, 32768)):
                stocks[f"{batch}x{tokens}"] = stock(batch, tokens, bandwidth)
                results.add(dict(case="stock", batch=batch, tokens=tokens, ms=stocks[f"{batch}x{tokens}"]))
    rows = []
    for name, w in points().items():
        if time.monotonic() - began > args.seconds - 5:
            print(f"no time for {name}", flush=True)
            continue
        try:
            rows += measure(name, w, variants)
        except Exception as e:
            print(f"{name}: {type(e).__name__} {str(e)[-400:]}", flush=True)
        results.rows = results.rows[: len(stocks)] + rows
        results.write()
        torch.cuda.empty_cache()
    plans = {}
    for variant in variants:
        if VARIANTS[variant][2] is None and time.monotonic() - began < args.seconds:
            plans[variant] = plan_ms(variant)
            results.add(dict(case="plan", variant=variant, layers=32, ms=plans[variant]))
    show(rows, stocks, plans)
    print(f"copy {bandwidth / 1e12:.2f} TB/s, {torch.cuda.get_device_name()}, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
