"""Prefill attention over a long cached prefix in packed pages, compared with stock kernels over bf16 pages.

    python -m bench.kernels.extend [--prefix 102400] [--new 1,4,8,16,64,1024] [--format k4v4] [--block 128]
        [--seconds 220] [--stock "fa3 page 128,.."]

One layer has 8 KV heads, GQA 4, head_dim 128. The baseline is the fastest variant of FlashAttention 3 (SGLang's default
on Hopper) and FlashInfer in `STOCK`; scores name it. Every variant is first checked against float64 on a short prefix
with fresh random inputs. Other cases are few new tokens after a cache hit, with the host's launch time; several
requests (`BATCHES`); a prompt without a prefix, exact and fake-quantized; other head sizes (`HEAD_DIMS`); and
collecting attention scores in a prefill of `--score` tokens.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from functools import partial

import torch

from kvc_kernels.extend.few_tokens import TIERS as FEW_ROWS
from kvc_kernels.extend.unpacked import MIN_NEW
from kvc_kernels.scores.reference import DECODE_STRIDE

from . import collecting
from .common import RESULTS, Budget, Results, Workload, copy_bandwidth, table
from .extend_stock import DIM, GROUP, HEADS, SCALE, STOCK, fa3_paged, new_rows, stock
from .timing import host_us, matmul_rate, timed

BATCHES = {  # name -> cached tokens of each request
    "16 x 2K": [2048] * 16,
    "16 of 2K to 26K": [2560 * (1 + i * 7 % 10) for i in range(16)],
    "64K among 15 x 1K": [65536] + [1024] * 15,
}
HEAD_DIMS = (64, 256)  # the CUDA kernel only supports 128
HEAD_DIM_CASES = ((102400, 1024), (16384, 2048))  # (cached, new) tokens
FEW, HIT = (1, 5, 32), 4352  # new tokens after a hit, and tokens of the hit


def variants():
    """Name -> options of `ExtendAttention`."""
    from kvc_kernels.extend.attention import Tuning

    out = {"hopper": dict(hopper=True, dense="none")}
    out["few"] = dict(appended=True, dense="none")  # the decode kernel
    out["triton 64x4"] = dict(hopper=False, dense="none")
    out["triton 128x8"] = dict(hopper=False, dense="none", tuning=Tuning(rows=128, warps=8))
    out["unpacked"] = dict(whole=True, hopper=False)  # for FlashInfer with many new tokens
    return out


def supports(name: str, new: int) -> bool:
    """Whether the variant supports `new` new tokens."""
    return {"few": new * GROUP <= FEW_ROWS[-1], "unpacked": new >= MIN_NEW}.get(name, True)


def run_ours(work: Workload, prefix: int, new: int, options: dict, *, check: bool):
    """Function that runs our kernel over one plan, stored bytes, and store; with `check`, the largest relative error of
    an output row instead. `prefix` is a multiple of the block size. The new rows are also in the pages of more
    blocks."""
    from kvc_kernels.append.kernel import append_triton
    from kvc_kernels.extend.attention import ExtendAttention

    p = work.block_tokens
    store, rows, _, size = work.build(batch=1, tokens=prefix + (new if new % p else new + 1))
    q, k, v = new_rows(new, work.head_dim)
    scale = work.head_dim**-0.5
    op = ExtendAttention(store, query_heads=HEADS * GROUP, max_blocks=rows.shape[1], **options)
    if options.get("appended"):
        at = torch.arange(prefix, prefix + new, device="cuda")
        append_triton(store, 0, rows[0, at // p].long(), at % p, k, v)
    op.plan(rows, [prefix], [new])
    if not check:
        return (lambda: op.run(0, q, k, v, scale=scale)), size, store
    out = op.run(0, q, k, v, scale=scale).double()
    ref = reference(store, q, k, v, rows[:, : prefix // p], prefix)
    return float((out - ref).norm(dim=-1).max() / ref.norm(dim=-1).mean())


def reference(store, q, k, v, rows, prefix: int) -> torch.Tensor:
    """Reference output, float64 `[N, Hq, D]` on the GPU."""
    from tests.support.random_store import dense_head

    new, p, out = q.shape[0], store.layout.block_tokens, []
    for h in range(HEADS):
        parts = [dense_head(store, int(b), 0, h, min(p, prefix - j * p)) for j, b in enumerate(rows[0].tolist())]
        kc, vc = (torch.cat([x[i].cuda() for x in parts] + [y[:, h].double()]) for i, y in ((0, k), (1, v)))
        logits = torch.einsum("ngd,sd->gns", q[:, h * GROUP : (h + 1) * GROUP].double(), kc) * q.shape[-1] ** -0.5
        future = torch.arange(len(kc), device="cuda") - (len(kc) - new) > torch.arange(new, device="cuda").unsqueeze(1)
        w = torch.softmax(logits.masked_fill(future, -torch.inf), -1)
        out.append(torch.einsum("gns,sd->ngd", w, vc))
    return torch.cat(out, 1)


def fresh_prompt(new: int) -> list[dict]:
    """Rows of a prompt without a prefix: our kernels, the libraries' ragged prefill, and fake-quantized blocks."""
    from kvc_kernels.extend.attention import ExtendAttention

    work, rows = Workload("k4v4", block_tokens=128), []
    store, blocks, _, _ = work.build(batch=1, tokens=new, format_id=0)
    q, k, v = new_rows(new)
    fmt = store.block_formats[1].high
    cases = {name: options for name, options in variants().items() if name not in ("unpacked", "few")}
    for library in ("fa3", "flashinfer"):
        cases[f"{library} ragged"] = dict(dense=library)
        cases[f"fake-quantized, {library}"] = dict(dense=library, fake_quant_format=fmt)
    cases["fake-quantized, triton"] = dict(dense="none", fake_quant_format=fmt)
    for name, options in cases.items():
        op = ExtendAttention(store, query_heads=HEADS * GROUP, **options)
        if op.ragged is None and options.get("dense") != "none":
            continue  # the library is missing, so another kernel would run
        op.plan(blocks, [0], [new])
        ms = timed(lambda op=op: op.run(0, q, k, v, scale=SCALE))
        rows.append(dict(case="no prefix", prefix=0, new=new, name=name, ms=ms))
    return rows


def baselines(prefixes: list[int], new: list[int], names: Sequence[str]) -> dict[str, float]:
    """Milliseconds of the stock kernels over bf16 pages."""
    out = {}
    for name in names:
        try:
            out[name] = timed(stock(name, prefixes, new))
        except Exception as error:
            print(f"{name}: {type(error).__name__} {str(error)[:200]}", flush=True)
        torch.cuda.empty_cache()
    return out


def batches(work: Workload, correct: set[str], new: int, names: Sequence[str]) -> list[dict]:
    """Rows of several requests with `new` tokens over separate prefixes."""
    from kvc_kernels.extend.attention import ExtendAttention

    out = []
    for case, prefixes in BATCHES.items():
        news, p = [new] * len(prefixes), work.block_tokens
        times = baselines(prefixes, news, names)
        best = min(times.values(), default=math.nan)
        store, rows, _, _ = work.build(batch=len(prefixes), tokens=max(prefixes))
        for i, n in enumerate(prefixes):
            rows[i, -(-n // p) :] = 0
        q, k, v = new_rows(sum(news))
        for name in correct - {"unpacked", "few"}:
            op = ExtendAttention(store, query_heads=HEADS * GROUP, **variants()[name])
            op.plan(rows, prefixes, news)
            times[name] = timed(partial(op.run, 0, q, k, v, scale=SCALE))
        out += [
            dict(case=case, prefix=sum(prefixes), new=new, name=name, ms=ms, vs_stock=ms / best, ours=name in correct)
            for name, ms in times.items()
        ]
        del store, rows
    return out


def over_prefix(
    work: Workload, correct: set[str], prefix: int, new: int, bandwidth: float, rate: float, names: Sequence[str]
) -> list[dict]:
    """Rows of one request: stock over bf16 pages, ours over packed pages."""
    ops = 4 * new * HEADS * GROUP * DIM * (prefix + new / 2)
    base, ours, size = baselines([prefix], [new], names), {}, 0
    for name in sorted(name for name in correct if supports(name, new)):
        fn, size, store = run_ours(work, prefix, new, variants()[name], check=False)
        ours[name] = timed(fn)
        del fn, store
    best = min(base.values(), default=math.nan)
    floor = dict(bytes_ms=size / bandwidth * 1e3, ops_ms=ops / rate * 1e3)
    return [
        dict(case="prefix", prefix=prefix, new=new, name=name, ms=ms, vs_stock=ms / best, tflops=ops / ms / 1e9)
        | floor
        | dict(ours=name in ours)
        for name, ms in {**base, **ours}.items()
    ]


def head_dims(fmt: str) -> list[dict]:
    """Rows of head sizes that the CUDA kernel does not support: the Triton kernel, unpacked blocks for a library, and
    stock."""
    out = []
    for dim in HEAD_DIMS:
        work = Workload(fmt, block_tokens=128, head_dim=dim)
        for prefix, new in HEAD_DIM_CASES:
            times = {"fa3 page 128": timed(fa3_paged(128, [prefix], [new], dim))}
            best = times["fa3 page 128"]
            for name in ("triton 64x4", "unpacked"):
                fn, _, store = run_ours(work, prefix, new, variants()[name], check=False)
                times[name] = timed(fn)
                del fn, store
            out += [
                dict(case=f"heads of {dim}", prefix=prefix, new=new, name=name, ms=ms, vs_stock=ms / best)
                for name, ms in times.items()
            ]
            torch.cuda.empty_cache()
    return out


def few_new(work: Workload, correct: set[str], names: Sequence[str]) -> list[dict]:
    """Rows of few new tokens after a hit: our kernels that support them, and stock over bf16 pages."""
    out = []
    for new in FEW:
        functions = {}
        for name in names:
            try:
                functions[name] = stock(name, [HIT], [new])
            except Exception as error:
                print(f"{name}: {type(error).__name__} {str(error)[:200]}", flush=True)
        for name in sorted(x for x in correct & {"hopper", "few", "triton 64x4"} if supports(x, new)):
            functions[name] = run_ours(work, HIT, new, variants()[name], check=False)[0]
        for name, fn in functions.items():
            row = dict(case="few", prefix=HIT, new=new, name=name, ms=timed(fn), host_us=host_us(fn))
            out.append(row | dict(ours=name in correct))
        del functions
    return out


def scores(rows: list[dict]) -> dict[str, tuple[float, str]]:
    """Times of our fastest variant relative to the fastest stock kernel, and overheads of collecting scores."""
    out = {}
    for new, name in ((1, "1"), (16, "16"), (64, "64"), (1024, "1k")):
        points = [r for r in rows if r["case"] == "prefix" and r["new"] == new]
        ratios = [r["vs_stock"] for r in points if r["ours"]]
        stock_times = [(r["ms"], r["name"]) for r in points if not r["ours"]]
        if ratios and stock_times:
            baseline = f"bf16, {min(stock_times)[1]}"
            out[f"extend.vs_stock.{name}"] = (min(ratios), "time over the fastest stock", baseline)
    cases = {case: [r for r in rows if r["case"] == case] for case in BATCHES}
    ratios = [min(r["vs_stock"] for r in points if r["ours"]) for points in cases.values() if points]
    if ratios and not math.isnan(max(ratios)):
        stock_times = [[(r["ms"], r["name"]) for r in points if not r["ours"]] for points in cases.values()]
        names = {min(times)[1] for times in stock_times if times}
        unit = f"time over the fastest stock, worst of {len(ratios)} batches"
        out["extend.vs_stock.batch"] = (max(ratios), unit, f"bf16, {', '.join(sorted(names))}")
    times = {r["name"]: r["ms"] for r in rows if r["case"] == "score"}
    if len(times) > 1:
        prefill = times["prefill of one layer"]
        out["score.prefill_overhead"] = (times["window 64"] / prefill, "share of a modeled prefill, window 64")
        for name, short in (("all", "all"), ("one in 16", "sampled")):
            if name in times:
                unit = f"share of a modeled prefill, queries: {name}"
                out[f"score.prefill_overhead_{short}"] = (times[name] / prefill, unit)
    steps = {r["name"]: r["ms"] for r in rows if r["case"] == "score decode"}
    if (sampled := f"one step in {DECODE_STRIDE}") in steps:
        out["score.decode_overhead"] = (steps[sampled] / steps["one layer"], f"share of a decode step, {sampled}")
    return out


COLUMNS = {"case": "", "name": "", "prefix": "", "new": "", "ms": ".3f", "vs_stock": ".2f", "tflops": ".0f",
           "bytes_ms": ".3f", "ops_ms": ".3f", "host_us": ".0f", "worst_row_error": ".4f"}  # fmt: skip


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prefix", type=int, default=102400)
    parser.add_argument("--new", default="1,4,8,16,64,1024")
    parser.add_argument("--format", default="k4v4")
    parser.add_argument("--kept", default="full")
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--fresh", type=int, default=8192, help="tokens of the prompt without a prefix; 0: none")
    parser.add_argument(
        "--score", type=int, default=16384, help="tokens of the prompt whose attention scores are collected; 0: none"
    )
    parser.add_argument("--seconds", type=float, default=220)
    parser.add_argument("--out", default=str(RESULTS / "extend.json"))
    parser.add_argument("--stock", default=",".join(STOCK), help="stock kernels, separated by commas")
    args = parser.parse_args(argv)
    args.stock = args.stock.split(",")
    return args


def main() -> None:
    args = arguments()
    work, budget = Workload(args.format, args.kept, block_tokens=args.block), Budget(args.seconds)
    bandwidth, rate = copy_bandwidth(), matmul_rate()
    results = Results(args.out, format=args.format, kept=args.kept, copy_bytes_per_s=bandwidth, matmul_ops_per_s=rate)
    for name, options in variants().items():
        try:
            size = {"unpacked": (4096, 600), "few": (1536, 4)}.get(name, (1536, 100))
            worst = run_ours(work, *size, options, check=True)
        except Exception as error:
            print(f"{name}: {type(error).__name__} {str(error)[:300]}", flush=True)
            continue
        results.add(dict(case="check", name=name, worst_row_error=worst))
    correct = {r["name"] for r in results.rows if r["worst_row_error"] < 0.02}
    jobs = {f"{n} new": lambda n=n: over_prefix(work, correct, args.prefix, n, bandwidth, rate, args.stock)
            for n in map(int, filter(None, args.new.split(",")))}  # fmt: skip
    jobs["few new"] = lambda: few_new(work, correct, args.stock)
    jobs["batches"] = lambda: batches(work, correct, 64, args.stock)
    jobs["head dims"] = lambda: head_dims(args.format)
    if args.score:
        jobs["scores"] = lambda: collecting.prefill_rows(args.score)
        jobs["scores of steps"] = lambda: collecting.decode_rows(64, args.score // 2)
    if args.fresh:
        jobs["no prefix"] = lambda: fresh_prompt(args.fresh)
    for name, job in jobs.items():
        if not budget.exceeded(name):
            try:
                results.add(*job())
            except Exception as error:
                print(f"{name}: {type(error).__name__} {str(error)[:300]}", flush=True)
    results.score(scores(results.rows))
    print(table(results.rows, COLUMNS))
    print(f"copy {bandwidth / 1e12:.2f} TB/s, matmul {rate / 1e12:.0f} TFLOP/s")
    budget.show()
    results.show()


if __name__ == "__main__":
    main()
