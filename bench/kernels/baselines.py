"""Stock decode attention on the same shapes: FlashInfer (bf16, fp8_e4m3; pages of 1 and 16 tokens) and SGLang's Triton.

    python bench/kernels/baselines.py --out FILE.json [--warm] [--shapes 64x8192,16x32768]

Needs flashinfer and sglang importable. `--warm` only compiles. Tokens lie in random slots (pages of 1) or random pages.
"""

from __future__ import annotations

import argparse

import torch
from common import cold_layers, copy_bandwidth, time_graph, write_json

HEADS, GROUP = 8, 4


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


def main() -> None:
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", default="")
    ap.add_argument("--warm", action="store_true")
    ap.add_argument("--shapes", default="64x8192,16x32768")
    ap.add_argument("--quick", action="store_true", help="bf16 and its fastest forms only")
    ap.add_argument("--dims", default="128,64")
    args = ap.parse_args()
    shapes = [tuple(map(int, s.split("x"))) for s in args.shapes.split(",")]
    if args.warm:
        shapes = [(2, 64)]
    bandwidth = copy_bandwidth()
    rows = []
    for dim in map(int, args.dims.split(",")):
        for batch, tokens in shapes if dim == 128 else shapes[:1]:
            for name, dtype in (("bf16", torch.bfloat16), ("fp8_e4m3", torch.float8_e4m3fn)):
                size = batch * tokens * HEADS * dim * 2 * (2 if name == "bf16" else 1)
                if args.quick and name == "fp8_e4m3":
                    continue
                runs = {f"flashinfer_page{p}_tc": (flashinfer, (p, True)) for p in (1, 16)}
                if name == "bf16" and not args.quick:
                    runs["flashinfer_page16"] = (flashinfer, (16, False))
                if not args.quick:
                    runs["sglang_triton"] = (sglang_triton, ())
                for kernel, (fn, extra) in runs.items():
                    try:
                        ms = fn(batch, tokens, dim, dtype, *extra)
                    except Exception as e:
                        print(
                            f"{kernel} {name} {batch}x{tokens} D{dim}: {type(e).__name__} {str(e)[-200:]}",
                            flush=True,
                        )
                        continue
                    torch.cuda.empty_cache()
                    of_copy = size / (ms * 1e-3) / bandwidth
                    rows.append(
                        {"kernel": kernel, "kv": name, "batch": batch, "tokens": tokens, "head_dim": dim, "ms": ms,
                         "bytes": size, "of_copy": of_copy}
                    )  # fmt: skip
                    if not args.warm:
                        print(f"{kernel:20s} {name:9s} {batch}x{tokens} D{dim}: {ms * 1e3:7.1f} us"
                              f"  {100 * of_copy:5.1f} % of copy", flush=True)  # fmt: skip
    if args.out:
        write_json(args.out, rows, copy_bytes_per_s=bandwidth)


if __name__ == "__main__":
    main()
