"""Compaction of a prompt's blocks in all layers and heads: the kernel, its plan, and plain torch beside it.

    python -m bench.kernels.compaction [--tokens 16384] [--layers 32] [--formats k4v4,k8v4+k4v2] [--out FILE]

8 KV heads, head_dim 128. The floor is every K/V row read once and every packed byte written once, at copy bandwidth.
"""

from __future__ import annotations

import argparse
import time

import torch

from .common import BF16, FORMATS, PoolLayout, Rung, choose_page_bytes, copy_bandwidth, write_json

HEADS, DIM = 8, 128


def build(names: str, layers: int, blocks: int, block_tokens: int):
    """A store with `blocks` full uncompressed blocks of random rows; scored where there are two tiers."""
    from kvc_kernels import ops
    from kvc_kernels.store import PageStore

    formats = [FORMATS[x] for x in names.split("+")]
    scored = len(formats) > 1
    page = choose_page_bytes(formats, head_dim=DIM, block_tokens=block_tokens, key_mode="channel", scored=scored)
    layout = PoolLayout(layers, HEADS, DIM, block_tokens, page, "channel", scored)
    rung = Rung(formats[0], formats[1] if scored else None)
    store = PageStore.create(
        layout, (Rung(BF16), rung), num_pages=1 + 2 * blocks * layout.block_pages_bf16, num_blocks=blocks + 1,
        dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    ids = torch.randperm(blocks, device="cuda") + 1
    refill(store, ids)
    gen = torch.Generator(device="cuda").manual_seed(0)
    shape = (blocks, layers, HEADS, block_tokens)
    if scored:
        # About what thresholds leave: 35 % high, 40 % low, the rest pruned, in ragged heads.
        x = torch.rand(shape, generator=gen, device="cuda") + 0.24 * torch.rand(shape[:3], device="cuda").unsqueeze(-1)
        tiers = torch.where(x < 0.47, 2, torch.where(x < 0.87, 1, 0)).to(torch.int8)
    else:
        tiers = ops.keep_all(blocks, layout, "cuda")
    return store, ids, tiers


def refill(store, ids: torch.Tensor) -> None:
    """Give `ids` fresh uncompressed pages of random rows."""
    from kvc_kernels import ops
    from kvc_kernels.ops.pack import bf16_rows

    if int(store.rung[ids[0]]) >= 0:
        ops.release(store, ids)
    ops.take_bf16(store, ids)
    k, v = bf16_rows(store.layout.page(BF16), store.pages, store.dtype)
    for some in store.table[ids].flatten().long().split(1 << 16):
        for rows in (k, v):
            rows[some] = torch.randn((len(some), *rows.shape[1:]), device="cuda").to(store.dtype)


def once(store, ids, tiers, move, repeats: int) -> tuple[float, float]:
    """Median milliseconds on the device and of the host's launches, each time from fresh rows."""
    device, host = [], []
    for _ in range(repeats):
        refill(store, ids)
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        began = time.perf_counter()
        a.record()
        move(store, ids, 1, tiers, from_rung=0)
        b.record()
        host.append(1e3 * (time.perf_counter() - began))
        b.synchronize()
        device.append(a.elapsed_time(b))
    return sorted(device)[repeats // 2], sorted(host)[repeats // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--formats", default="k4v4,k8v4,k8v4+k4v2")
    parser.add_argument("--out", default="bench/results/kernels/compaction.json")
    args = parser.parse_args()
    from kvc_kernels import ops
    from kvc_kernels.ops.compact_triton import compact_triton

    bandwidth, rows = copy_bandwidth(), []
    for names in args.formats.split(","):
        for blocks in (args.tokens // args.block, 8):
            store, ids, tiers = build(names, args.layers, blocks, args.block)
            once(store, ids, tiers, compact_triton, 1)
            ours, launch = once(store, ids, tiers, compact_triton, 5)
            pages = int((store.table[ids] > 0).sum())
            digest = ops.block_digest(store, int(ids[0]))
            refill(store, ids)
            rows_read = blocks * args.block * args.layers * HEADS * DIM * 4
            floor = (rows_read + pages * store.layout.page_bytes) / bandwidth * 1e3
            once(store, ids, tiers, ops.compact, 1)
            torch_ms, _ = once(store, ids, tiers, ops.compact, 1)
            row = dict(
                format=names, blocks=blocks, block_tokens=args.block, layers=args.layers, ms=ours, launch_ms=launch,
                floor_ms=floor, torch_ms=torch_ms, digest_of_one_block=digest,
            )  # fmt: skip
            if len(names.split("+")) == 1:
                row["quota_plan_ms"] = plan_time(store, ids, args)
            rows.append(row)
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
            del store
            torch.cuda.empty_cache()
    write_json(args.out, rows, copy_bytes_s=bandwidth)


def plan_time(store, ids, args) -> float:
    """Milliseconds of a quota plan that keeps half of the pages, from random scores."""
    from kvc_kernels import ops

    layout = store.layout
    page = layout.page(store.ladder[1].high)
    scores = torch.rand((len(ids), args.layers, HEADS, args.block), device="cuda")
    half = args.layers * HEADS * (-(-args.block // page.tokens)) // 2
    times = []
    for _ in range(4):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        ops.quota(scores, half, page.tokens)
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b))
    return sorted(times)[1]


if __name__ == "__main__":
    main()
