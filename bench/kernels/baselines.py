"""Stock decode attention over bf16 and fp8_e4m3: FlashAttention 3, FlashInfer and SGLang's Triton kernel.

    python -m bench.kernels.baselines [--out FILE.json] [--warm] [--shapes 64x8192,16x32768]

Needs flashinfer, sgl_kernel and sglang. `--warm` only compiles. Pages are in random order. `bench.kernels.decode` times
the same functions together with our kernel.
"""

from __future__ import annotations

import argparse

import torch

from .common import RESULTS, Budget, Results, cold_layers, copy_bandwidth, table, time_graph

HEADS, GROUP = 8, 4
DTYPES = {"bf16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}
COLUMNS = {"kernel": "", "kv": "", "batch": "", "tokens": "", "head_dim": "", "ms": ".3f", "of_copy": ".1%"}


def flashinfer(batch: int, tokens: int, dim: int, dtype: torch.dtype, page: int, tensor_cores: bool) -> float:
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    dev = "cuda"
    total = batch * tokens // page
    layers = cold_layers(2 * total * page * HEADS * dim * dtype.itemsize)
    shape = (2, total, page, HEADS, dim)
    kv = [torch.randn(shape, dtype=torch.bfloat16, device=dev).to(dtype) for _ in range(layers)]
    q = torch.randn((batch, HEADS * GROUP, dim), dtype=torch.bfloat16, device=dev)
    indptr = torch.arange(batch + 1, dtype=torch.int32, device=dev) * (tokens // page)
    indices = torch.randperm(total, device=dev).int()
    last = torch.full((batch,), page, dtype=torch.int32, device=dev)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(512 << 20, dtype=torch.uint8, device=dev), "NHD", use_cuda_graph=True,
        use_tensor_cores=tensor_cores, backend="fa2", paged_kv_indptr_buffer=indptr.clone(),
        paged_kv_indices_buffer=indices.clone(), paged_kv_last_page_len_buffer=last.clone(),
    )  # fmt: skip
    wrapper.plan(
        indptr, indices, last, HEADS * GROUP, HEADS, dim, page, q_data_type=torch.bfloat16, kv_data_type=dtype
    )
    out = torch.empty_like(q)
    return time_graph(lambda i: wrapper.run(q, tuple(kv[i % layers]), out=out), inner=max(10, layers))


def fa3(batch: int, tokens: int, dim: int, dtype: torch.dtype, page: int) -> float:
    """FlashAttention 3 as SGLang's `fa3` backend calls it in decode steps: page table and scheduler metadata are built
    once per step, and queries over fp8 pages are fp8, too."""
    from sgl_kernel.flash_attn import flash_attn_with_kvcache, get_scheduler_metadata

    dev, total = "cuda", batch * tokens // page
    layers = cold_layers(2 * batch * tokens * HEADS * dim * dtype.itemsize)
    shape = (2, total, page, HEADS, dim)
    kv = [torch.randn(shape, dtype=torch.bfloat16, device=dev).to(dtype) for _ in range(layers)]
    q = torch.randn((batch, HEADS * GROUP, dim), dtype=torch.bfloat16, device=dev).to(dtype)
    table = torch.randperm(total, device=dev).int().view(batch, -1)
    lens = torch.full((batch,), tokens, dtype=torch.int32, device=dev)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=dev)
    metadata = get_scheduler_metadata(
        batch_size=batch, max_seqlen_q=1, max_seqlen_k=tokens, num_heads=HEADS * GROUP, num_heads_k=HEADS, headdim=dim,
        cache_seqlens=lens, qkv_dtype=dtype, cu_seqlens_q=starts, page_size=page, causal=True,
    )  # fmt: skip
    scales = {}
    if dtype != torch.bfloat16:
        one = torch.ones((batch, HEADS), device=dev)
        scales = dict(q_descale=one, k_descale=one, v_descale=one)
    return time_graph(
        lambda i: flash_attn_with_kvcache(
            q, *kv[i % layers], page_table=table, cache_seqlens=lens, cu_seqlens_q=starts, max_seqlen_q=1, causal=True,
            scheduler_metadata=metadata, **scales,
        ),
        inner=max(10, layers),
    )


def sglang_triton(batch: int, tokens: int, dim: int, dtype: torch.dtype) -> float:
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
    from sglang.kernels.ops.attention.metadata import get_num_kv_splits_triton

    dev, splits = "cuda", 8
    total = batch * tokens
    layers = cold_layers(2 * total * HEADS * dim * dtype.itemsize)
    shape = (2, total, HEADS, dim)
    kv = [torch.randn(shape, dtype=torch.bfloat16, device=dev).to(dtype) for _ in range(layers)]
    q = torch.randn((batch, HEADS * GROUP, dim), dtype=torch.bfloat16, device=dev)
    indptr = torch.arange(batch + 1, dtype=torch.int32, device=dev) * tokens
    indices = torch.randperm(total, device=dev)
    lens = torch.full((batch,), tokens, dtype=torch.int32, device=dev)
    num = torch.empty(batch, dtype=torch.int32, device=dev)
    cores = torch.cuda.get_device_properties(0).multi_processor_count
    get_num_kv_splits_triton[(1,)](num, lens, batch, 1, HEADS * GROUP, HEADS, splits, cores, MAX_NUM_SEQ=256)
    logits = torch.empty((batch, HEADS * GROUP, splits, dim), dtype=torch.float32, device=dev)
    lse = torch.empty((batch, HEADS * GROUP, splits), dtype=torch.float32, device=dev)
    out = torch.empty_like(q)
    return time_graph(
        lambda i: decode_attention_fwd(
            q, *kv[i % layers], out, indptr, indices, logits, lse, num, splits, dim**-0.5, 1.0, 1.0
        ),
        inner=max(10, layers),
    )


def kernels(kv: str, *, quick: bool) -> dict:
    """Name -> (function, additional arguments). With `quick`, only the fastest variants."""
    runs = {f"fa3_page{p}": (fa3, (p,)) for p in (1, 64, 128)}
    runs |= {f"flashinfer_page{p}_tc": (flashinfer, (p, True)) for p in (1, 16)}
    if not quick:
        if kv == "bf16":
            runs["flashinfer_page16"] = (flashinfer, (16, False))
        runs["sglang_triton"] = (sglang_triton, ())
    return runs


def measure(
    batch: int, tokens: int, dim: int, kv: str, bandwidth: float, *, quick: bool, library: str = ""
) -> list[dict]:
    """Rows of all kernels of `library` (default: all libraries). Prints the errors of kernels that do not run."""
    rows = []
    size = batch * tokens * HEADS * dim * 2 * DTYPES[kv].itemsize
    for kernel, (fn, extra) in kernels(kv, quick=quick).items():
        if not kernel.startswith(library):
            continue
        try:
            ms = fn(batch, tokens, dim, DTYPES[kv], *extra)
        except Exception as e:
            print(f"{kernel} {kv} {batch}x{tokens} D{dim}: {type(e).__name__} {str(e)[-200:]}", flush=True)
            continue
        torch.cuda.empty_cache()
        row = dict(kernel=kernel, kv=kv, batch=batch, tokens=tokens, head_dim=dim, ms=ms, bytes=size)
        rows.append({**row, "of_copy": size / (ms * 1e-3) / bandwidth})
    return rows


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--out", default=str(RESULTS / "baselines.json"))
    ap.add_argument("--warm", action="store_true")
    ap.add_argument("--shapes", default="64x8192,16x32768")
    ap.add_argument("--quick", action="store_true", help="only the fastest variants")
    ap.add_argument("--dims", default="128,64")
    ap.add_argument("--seconds", type=float, default=220)
    args = ap.parse_args(argv)
    args.shapes = [(2, 64)] if args.warm else [tuple(map(int, s.split("x"))) for s in args.shapes.split(",")]
    return args


def main() -> None:
    args = arguments()
    budget, bandwidth = Budget(args.seconds), copy_bandwidth()
    results = Results("/dev/null" if args.warm else args.out, copy_bytes_per_s=bandwidth)
    for dim in map(int, args.dims.split(",")):
        for batch, tokens in args.shapes if dim == 128 else args.shapes[:1]:
            for kv in DTYPES:
                if not budget.exceeded(f"{kv} {batch}x{tokens} D{dim}"):
                    results.add(*measure(batch, tokens, dim, kv, bandwidth, quick=args.quick))
    print(table(results.rows, COLUMNS))
    budget.show()
    results.show()


if __name__ == "__main__":
    main()
