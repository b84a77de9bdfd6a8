"""Compaction of a prompt's blocks in all layers and heads: the kernel, its plan, and plain torch.

    python -m bench.kernels.compaction [--tokens 16384] [--layers 32] [--formats k4v4,k8v4+k4v2] [--seconds 220]

8 KV heads, head_dim 128. The roofline reads every K/V row once and writes every packed byte once, at copy bandwidth.
The share of prefill relates a whole prompt's blocks to the prefill of an 8B-shaped model (`layer.py`). The share of
decoding is for `--batch` requests at `--context` tokens, each of which fills one block per block length of steps; each
block is moved by its own launch.

`ms` is the device's time while the host runs ahead of it, as with overlap scheduling: the device is kept busy until all
launches are queued. `launch_ms` is the host's time for them. Prefill and decode step are modeled: matrix products and
attention of a layer, times the number of layers.

Two-tier formats also have `again_ms`, a move of packed blocks that takes some tokens down a tier, and `plan_ms`,
LeanKV's plan of uncompressed and of packed blocks, each with the host's launches. During generation, a full block costs
one plan and move, and on average at most one more of a packed block (`places_to_replan`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from .common import (
    BF16,
    FORMATS,
    RESULTS,
    BlockFormat,
    Budget,
    PoolLayout,
    Results,
    Workload,
    choose_page_bytes,
    copy_bandwidth,
    table,
    time_graph,
)

HEADS, DIM = 8, 128
AHEAD_CYCLES = 20_000_000  # about 10 ms, in which the host queues the measured work


def build(names: str, layers: int, blocks: int, block_tokens: int, device: str = "cuda"):
    """A store with `blocks` full uncompressed blocks of random rows; scored where there are two tiers.

    Pages are those that a server would choose. Tiers are None if everything is kept, as the server's policy would
    return.
    """
    from kvc_kernels.store import PageStore

    formats = [FORMATS[x] for x in names.split("+")]
    has_scores = len(formats) > 1
    page = choose_page_bytes(
        formats, head_dim=DIM, block_tokens=block_tokens, has_scores=has_scores, whole=not has_scores
    )
    layout = PoolLayout(layers, HEADS, DIM, block_tokens, page, has_scores)
    block_format = BlockFormat(formats[0], formats[1] if has_scores else None)
    store = PageStore.create(
        layout, (BlockFormat(BF16), block_format), num_pages=1 + 2 * blocks * layout.block_pages_bf16,
        num_blocks=blocks + 1,
        dtype=torch.bfloat16, device=device,
    )  # fmt: skip
    ids = torch.randperm(blocks, device=device) + 1
    refill(store, ids)
    if not has_scores:
        return store, ids, None
    gen = torch.Generator(device=device).manual_seed(0)
    shape = (blocks, layers, HEADS, block_tokens)
    # About what thresholds leave: 35 % high, 40 % low, the rest pruned, in ragged heads.
    x = torch.rand(shape, generator=gen, device=device) + 0.24 * torch.rand(shape[:3], device=device).unsqueeze(-1)
    return store, ids, torch.where(x < 0.47, 2, torch.where(x < 0.87, 1, 0)).to(torch.int8)


def refill(store, ids: torch.Tensor) -> None:
    """Give `ids` fresh uncompressed pages of random rows."""
    from kvc_kernels import ops
    from kvc_kernels.common.bits import bf16_rows

    if int(store.format_id[ids[0]]) >= 0:
        ops.release(store, ids)
    ops.take_bf16(store, ids)
    k, v = bf16_rows(store.layout.page(BF16), store.pages, store.dtype)
    for some in store.table[ids].flatten().long().split(1 << 16):
        for rows in (k, v):
            rows[some] = torch.randn((len(some), *rows.shape[1:]), device=store.device).to(store.dtype)


def once(store, ids, tiers, move, repeats: int) -> tuple[float, float]:
    """`timed`, each time from fresh rows."""
    return timed(lambda: refill(store, ids), lambda: move(store, ids, 1, tiers, from_format=0), repeats)


def timed(prepare: Callable[[], object], run: Callable[[], object], repeats: int = 5) -> tuple[float, float]:
    """Median milliseconds on the device, with the host ahead, and of the host's launches."""
    device, host = [], []
    for _ in range(repeats):
        prepare()
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(AHEAD_CYCLES)
        a.record()
        began = time.perf_counter()
        run()
        host.append(1e3 * (time.perf_counter() - began))
        b.record()
        b.synchronize()
        device.append(a.elapsed_time(b))
    return sorted(device)[repeats // 2], sorted(host)[repeats // 2]


def plan_time(store, ids, args) -> float:
    """Milliseconds of a quota plan that keeps half of the pages, from random scores."""
    from kvc_kernels import ops

    layout = store.layout
    page = layout.page(store.block_formats[1].high)
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


def tiered(store, ids, tiers) -> dict[str, float]:
    """Times of two-tier blocks other than their first move. The blocks are packed afterwards."""
    from kvc_kernels import ops
    from kvc_kernels.compact.launch import compact_triton
    from kvc_kernels.tiering.thresholds_kernel import plan_thresholds_triton

    out = {}
    starts, alpha = ids * store.layout.block_tokens, ops.Thresholds(1.0, 0.02)
    lengths = torch.full_like(ids, 2 * len(ids) * store.layout.block_tokens)
    refill(store, ids)
    for format_id, key in ((0, "plan"), (1, "plan_again")):

        def plan(format_id=format_id):
            return plan_thresholds_triton(
                store, ids, starts, lengths, alpha, ops.ScoreSampling(), from_format=format_id,
                to=store.block_formats[1]
            )

        timed(lambda: None, plan, 1)
        out[f"{key}_ms"], out[f"{key}_launch_ms"] = timed(lambda: None, plan)
        if not format_id:
            compact_triton(store, ids, 1, tiers, from_format=0)
    less = (tiers - (torch.rand(tiers.shape, device=tiers.device) < 0.1).to(torch.int8)).clamp_(min=0)

    def fresh():
        refill(store, ids)
        compact_triton(store, ids, 1, tiers, from_format=0)

    def move():
        compact_triton(store, ids, 1, less, from_format=1)

    timed(fresh, move, 1)
    out["again_ms"], out["again_launch_ms"] = timed(fresh, move)
    return out


def measure(names: str, blocks: int, args, bandwidth: float) -> dict:
    """One row: `blocks` blocks moved by the kernel, and once by plain torch on the same device."""
    from kvc_kernels import ops
    from kvc_kernels.compact.launch import compact_triton

    store, ids, tiers = build(names, args.layers, blocks, args.block)
    once(store, ids, tiers, compact_triton, 1)
    ours, launch = once(store, ids, tiers, compact_triton, 5)
    pages = int((store.table[ids] > 0).sum())
    digest = ops.block_digest(store, int(ids[0]))
    rows_read = blocks * args.block * args.layers * HEADS * DIM * 4
    floor = (rows_read + pages * store.layout.page_bytes) / bandwidth * 1e3
    row = dict(
        case="compact", format=names, blocks=blocks, block_tokens=args.block, layers=args.layers, ms=ours,
        launch_ms=launch, floor_ms=floor, digest_of_one_block=digest,
    )  # fmt: skip
    if blocks > 1:
        once(store, ids, tiers, ops.compact.reference, 1)
        row["torch_ms"], _ = once(store, ids, tiers, ops.compact.reference, 1)
    if len(names.split("+")) == 1:
        refill(store, ids)
        row["quota_plan_ms"] = plan_time(store, ids, args)
    else:
        row |= tiered(store, ids, tiers)
    return row


def model_times(args) -> list[dict]:
    """Milliseconds of a whole prefill and of a decode step of an 8B-shaped model, from one layer's."""
    from kvc_kernels.decode.attention import DecodeAttention

    from . import layer

    store, rows, lens, _ = Workload("k4v4", block_tokens=args.block, batch=args.batch, tokens=args.context).build()
    q = torch.randn((args.batch, layer.GROUP * HEADS, DIM), device="cuda").bfloat16()
    op = DecodeAttention(store, max_batch=args.batch, max_blocks=rows.shape[1], query_heads=q.shape[1])
    op.plan(rows, lens)
    attention = time_graph(lambda _: op.run(0, q, scale=DIM**-0.5))
    step = layer.LAYERS * (attention + layer.products_ms(args.batch))
    del store
    torch.cuda.empty_cache()
    return [
        dict(case="model", name="prefill", tokens=args.tokens, ms=layer.LAYERS * layer.prefill_ms(args.tokens)),
        dict(case="model", name="decode step", batch=args.batch, tokens=args.context, ms=step),
    ]


def scores(rows: list[dict], batch: int) -> dict[str, tuple[float, str]]:
    """Of the first format: the prompt's blocks over its prefill, and a step's share of blocks over the step."""
    moves = [r for r in rows if r["case"] == "compact"]
    whole = {r["name"]: r["ms"] for r in rows if r["case"] == "model"}
    if not moves or len(whole) < 2:
        return {}
    mine = {r["blocks"]: r for r in moves if r["format"] == moves[0]["format"]}
    prompt, out = mine[max(mine)], {}
    out["compaction.prefill_overhead"] = (prompt["ms"] / whole["prefill"], "share of a modelled prefill")
    if 1 in mine:
        # Blocks fill at random steps, so most come alone. Exposed: where nothing hides the host's launches.
        one, step = mine[1], whole["decode step"] * mine[1]["block_tokens"] / batch
        out["compaction.decode_overhead"] = (one["ms"] / step, "share of a modelled decode step")
        exposed = max(one["ms"], one["launch_ms"]) / step
        out["compaction.decode_overhead_exposed"] = (exposed, "share of a modelled decode step, launches not hidden")
        for r in (r for r in moves if r["blocks"] == 1 and "again_ms" in r):
            parts = sum(r[key] for key in ("ms", "plan_ms", "plan_again_ms", "again_ms"))
            unit = "share of a modelled decode step, packed again once"
            out["compaction.leankv_decode_overhead"] = (parts / step, unit)
    return out


COLUMNS = {"case": "", "format": "", "name": "", "blocks": "", "ms": ".3f", "launch_ms": ".3f", "floor_ms": ".3f",
           "torch_ms": ".1f", "quota_plan_ms": ".3f", "plan_ms": ".3f",
           "plan_again_ms": ".3f", "again_ms": ".3f", "again_launch_ms": ".3f"}  # fmt: skip


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--formats", default="k4v4,k8v4,k8v4+k4v2")
    parser.add_argument("--seconds", type=float, default=220)
    parser.add_argument("--out", default=str(RESULTS / "compaction.json"))
    return parser.parse_args(argv)


def main() -> None:
    args = arguments()
    budget, bandwidth = Budget(args.seconds), copy_bandwidth()
    results = Results(args.out, copy_bytes_per_s=bandwidth)
    results.add(*model_times(args))
    for names in args.formats.split(","):
        for blocks in (args.tokens // args.block, 8, 1):
            if not budget.over(f"{names}, {blocks} blocks"):
                results.add(measure(names, blocks, args, bandwidth))
                torch.cuda.empty_cache()
    results.score(scores(results.rows, args.batch))
    print(table(results.rows, COLUMNS))
    budget.show()
    results.show()


if __name__ == "__main__":
    main()
