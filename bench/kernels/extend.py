"""Extend attention over a long cached prefix in packed pages, beside FlashInfer over bf16 pages of the same lengths.

    python -m bench.kernels.extend [--prefix 102400] [--new 64,1024] [--format k4v4] [--block 128] [--out FILE]

One layer of 8 KV heads, GQA 4, head_dim 128. FlashInfer runs with each backend and page size named in `BASELINES`; the
best counts. Every variant is checked against float64 on a short prefix first, with fresh random inputs.
"""

from __future__ import annotations

import argparse
import math

import torch

from .common import Workload, copy_bandwidth, time_graph, write_json

BASELINES = (("fa2", 1), ("fa2", 16), ("fa3", 1))
HEADS, GROUP, DIM = 8, 4, 128
SCALE = 1 / math.sqrt(DIM)


def matmul_rate() -> float:
    """Operations a second of a large bf16 product."""
    a, b = torch.randn((2, 8192, 8192), device="cuda", dtype=torch.bfloat16)
    return 2 * 8192**3 / (time_graph(lambda _: a @ b, inner=3) * 1e-3)


def timed(fn) -> float:
    """Median milliseconds; from a CUDA graph where the function can be captured, else from events."""
    try:
        return time_graph(lambda _: fn(), inner=5)
    except RuntimeError:
        torch.cuda.synchronize()
        times = []
        for _ in range(9):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            for _ in range(5):
                fn()
            b.record()
            b.synchronize()
            times.append(a.elapsed_time(b) / 5)
        return sorted(times)[4]


def new_rows(n: int):
    qkv = torch.randn((n, (GROUP + 2) * HEADS, DIM), device="cuda", dtype=torch.bfloat16)
    return qkv.split((GROUP * HEADS, HEADS, HEADS), 1)


def flashinfer_paged(backend: str, page: int, prefix: int, new: int):
    """A closure that attends `new` tokens over prefix + new tokens in randomly placed bf16 pages."""
    import flashinfer

    total = prefix + new
    pages = -(-total // page)
    cache = torch.randn((pages, 2, page, HEADS, DIM), device="cuda", dtype=torch.bfloat16)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), "NHD", backend=backend
    )
    wrapper.plan(
        torch.tensor([0, new], dtype=torch.int32),
        torch.tensor([0, pages], dtype=torch.int32),
        torch.randperm(pages, device="cuda").int(),
        torch.tensor([(total - 1) % page + 1], dtype=torch.int32),
        HEADS * GROUP, HEADS, DIM, page, causal=True, sm_scale=SCALE, q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )  # fmt: skip
    q = new_rows(new)[0].contiguous()
    return lambda: wrapper.run(q, cache)


def variants():
    """name -> options of `ExtendAttention`."""
    from kvc_kernels.ops.extend_attention_triton import Tuning

    out = {"hopper": dict(hopper=True, flashinfer=False)}
    out["triton 64x4"] = dict(hopper=False, flashinfer=False)
    out["triton 128x8"] = dict(hopper=False, flashinfer=False, tuning=Tuning(rows=128, warps=8))
    return out


def run_ours(work: Workload, prefix: int, new: int, options: dict, *, check: bool):
    """A closure over one plan; with `check`, the worst relative error of an output row instead."""
    from kvc_kernels.ops.extend_attention_triton import ExtendAttention

    store, rows, _, size = work.build(batch=1, tokens=prefix)
    q, k, v = new_rows(new)
    op = ExtendAttention(store, query_heads=HEADS * GROUP, **options)
    op.plan(rows, [prefix], [new])
    if not check:
        return (lambda: op.run(0, q, k, v, scale=SCALE)), size, store
    out = op.run(0, q, k, v, scale=SCALE).double()
    ref = reference(store, q, k, v, rows, prefix)
    return float((out - ref).norm(dim=-1).max() / ref.norm(dim=-1).mean())


def reference(store, q, k, v, rows, prefix: int) -> torch.Tensor:
    """float64 `[N, Hq, D]` on the GPU."""
    from kvc_kernels.testing import dense_head

    new, p, out = q.shape[0], store.layout.block_tokens, []
    for h in range(HEADS):
        parts = [dense_head(store, int(b), 0, h, min(p, prefix - j * p)) for j, b in enumerate(rows[0].tolist())]
        kc, vc = (torch.cat([x[i].cuda() for x in parts] + [y[:, h].double()]) for i, y in ((0, k), (1, v)))
        logits = torch.einsum("ngd,sd->gns", q[:, h * GROUP : (h + 1) * GROUP].double(), kc) * SCALE
        later = torch.arange(len(kc), device="cuda") - (len(kc) - new) > torch.arange(new, device="cuda").unsqueeze(1)
        w = torch.softmax(logits.masked_fill(later, -torch.inf), -1)
        out.append(torch.einsum("gns,sd->ngd", w, vc))
    return torch.cat(out, 1)


def fresh_prompt(new: int) -> list[dict]:
    """No prefix at all: FlashInfer's ragged prefill, which serves it, and the kernels' own tiles."""
    from kvc_kernels.ops.extend_attention_triton import ExtendAttention

    work, rows = Workload("k4v4", block_tokens=128), []
    store = work.build(batch=1, tokens=256)[0]
    q, k, v = new_rows(new)
    none = torch.zeros((1, 1), dtype=torch.int32, device="cuda")
    for name, options in {**variants(), "flashinfer ragged": dict(flashinfer=True)}.items():
        op = ExtendAttention(store, query_heads=HEADS * GROUP, **options)
        op.plan(none, [0], [new])
        ms = timed(lambda op=op: op.run(0, q, k, v, scale=SCALE))
        rows.append(dict(case="no prefix", prefix=0, new=new, name=name, ms=ms))
        print(f"no prefix, {new} new: {name:20} {ms:8.3f} ms", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefix", type=int, default=102400)
    parser.add_argument("--new", default="64,1024")
    parser.add_argument("--format", default="k4v4")
    parser.add_argument("--kept", default="full")
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--fresh", type=int, default=8192)
    parser.add_argument("--out", default="bench/results/kernels/extend.json")
    args = parser.parse_args()
    work = Workload(args.format, args.kept, block_tokens=args.block)
    bandwidth, rate = copy_bandwidth(), matmul_rate()
    print(f"copy {bandwidth / 1e12:.2f} TB/s, matmul {rate / 1e12:.0f} TFLOP/s", flush=True)
    rows = []
    for name, options in variants().items():
        try:
            worst = run_ours(work, 1500, 100, options, check=True)
        except Exception as error:
            print(f"{name}: {type(error).__name__} {str(error)[:300]}", flush=True)
            continue
        rows.append(dict(case="check", name=name, worst_row_error=worst))
        print(f"{name}: worst row error {worst:.4f}", flush=True)
    good = {r["name"] for r in rows if r["worst_row_error"] < 0.02}
    for new in map(int, args.new.split(",")):
        ops = 4 * new * HEADS * GROUP * DIM * (args.prefix + new / 2)
        base = {}
        for backend, page in BASELINES:
            try:
                base[f"flashinfer {backend} page {page}"] = timed(flashinfer_paged(backend, page, args.prefix, new))
            except Exception as error:
                print(f"flashinfer {backend} page {page}: {type(error).__name__} {str(error)[:200]}", flush=True)
        best = min(base.values(), default=math.nan)
        ours = {}
        for name in good:
            fn, size, store = run_ours(work, args.prefix, new, variants()[name], check=False)
            ours[name] = timed(fn)
            del fn, store
        floor = dict(bytes_ms=size / bandwidth * 1e3, ops_ms=ops / rate * 1e3)
        for name, ms in {**base, **ours}.items():
            row = dict(case="prefix", prefix=args.prefix, new=new, name=name, ms=ms, vs_flashinfer=ms / best, **floor)
            rows.append({**row, "tflops": ops / ms / 1e9})
            print(
                f"{new} new: {name:24} {ms:8.3f} ms {ops / ms / 1e9:5.0f} TFLOP/s, {ms / best:.2f}x of FlashInfer; "
                f"floors {floor['bytes_ms']:.3f} (bytes) {floor['ops_ms']:.3f} (operations)",
                flush=True,
            )
    if args.fresh:
        rows += fresh_prompt(args.fresh)
    write_json(args.out, rows, format=args.format, kept=args.kept, copy_bytes_s=bandwidth, matmul_ops_s=rate)


if __name__ == "__main__":
    main()
