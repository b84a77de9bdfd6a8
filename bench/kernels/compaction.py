"""Time to pack a prompt's blocks in all layers and heads: the kernel, its plan, and plain torch.

    python -m bench.kernels.compaction [--tokens 16384] [--layers 32] [--formats k4v4,k8v4+k4v2] [--seconds 220]

8 KV heads, head_dim 128. The roofline (`floor_ms`) reads every K/V row once and writes every packed byte once, at copy
bandwidth. The prefill overhead relates all blocks of a prompt to the prefill of an 8B-shaped model. The decode overhead
is for `--batch` requests of `--context` tokens. Each request fills one block per `--block` steps, and each block has
its own launch.

`ms` is device time while the host runs ahead, as with overlap scheduling: the device is busy until all launches are
queued. `launch_ms` is the host's time for the launches. Times of a prefill and a decode step are modeled as the matrix
products and attention of a layer (`layer.py`) times the number of layers.

Two-tier formats also have `again_ms`, the time of a move that demotes some tokens of packed blocks, and `plan_ms` and
`plan_again_ms`, the times of LeanKV's plan of uncompressed and of packed blocks, all with the host's launch times. A
block that fills during generation costs one plan and one move. On average, at most one packed block is planned and
moved again (`places_to_replan`).
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
AHEAD_CYCLES = 20_000_000  # about 10 ms, during which the host queues the measured work


def build(names: str, layers: int, blocks: int, block_tokens: int, device: str = "cuda"):
    """Store, block ids and tiers of `blocks` full uncompressed blocks of random rows.

    The page size is the one that a server would choose. Two-tier formats have scores. As in the server's policies,
    tiers are None if all tokens are kept.
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
    # Similar to LeanKV's thresholds: 35 % high, 40 % low, the rest pruned, with another share in each head.
    x = torch.rand(shape, generator=gen, device=device) + 0.24 * torch.rand(shape[:3], device=device).unsqueeze(-1)
    return store, ids, torch.where(x < 0.47, 2, torch.where(x < 0.87, 1, 0)).to(torch.int8)


def refill(store, ids: torch.Tensor) -> None:
    """Give the blocks `ids` new uncompressed pages with random rows."""
    from kvc_kernels import ops
    from kvc_kernels.common.bits import bf16_rows

    if int(store.format_id[ids[0]]) >= 0:
        ops.release(store, ids)
    ops.take_bf16(store, ids)
    k, v = bf16_rows(store.layout.page(BF16), store.pages, store.dtype)
    for pages in store.table[ids].flatten().long().split(1 << 16):
        for rows in (k, v):
            rows[pages] = torch.randn((len(pages), *rows.shape[1:]), device=store.device).to(store.dtype)


def move_time(store, ids, tiers, move, repeats: int) -> tuple[float, float]:
    """`timed` for a first move, each time from new uncompressed rows."""
    return timed(lambda: refill(store, ids), lambda: move(store, ids, 1, tiers, from_format=0), repeats)


def timed(prepare: Callable[[], object], run: Callable[[], object], repeats: int = 5) -> tuple[float, float]:
    """Median milliseconds of `run` on the device, while the host runs ahead, and on the host."""
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
    """Milliseconds of a quota plan that keeps half of the pages, with random scores."""
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
    """Times of plans and of a second move of two-tier blocks. The blocks are packed afterwards."""
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
                store, ids, starts, lengths, lengths, alpha, ops.ScoreSampling(), from_format=format_id,
                to=store.block_formats[1]
            )

        timed(lambda: None, plan, 1)
        out[f"{key}_ms"], out[f"{key}_launch_ms"] = timed(lambda: None, plan)
        if not format_id:
            compact_triton(store, ids, 1, tiers, from_format=0)
    demoted = (tiers - (torch.rand(tiers.shape, device=tiers.device) < 0.1).to(torch.int8)).clamp_(min=0)

    def prepare():
        refill(store, ids)
        compact_triton(store, ids, 1, tiers, from_format=0)

    def move():
        compact_triton(store, ids, 1, demoted, from_format=1)

    timed(prepare, move, 1)
    out["again_ms"], out["again_launch_ms"] = timed(prepare, move)
    return out


def measure(names: str, blocks: int, args, bandwidth: float) -> dict:
    """Row of `blocks` blocks, moved by the kernel and once by plain torch on the same device."""
    from kvc_kernels import ops
    from kvc_kernels.compact.launch import compact_triton

    store, ids, tiers = build(names, args.layers, blocks, args.block)
    move_time(store, ids, tiers, compact_triton, 1)
    ours, launch = move_time(store, ids, tiers, compact_triton, 5)
    pages = int((store.table[ids] > 0).sum())
    digest = ops.block_digest(store, int(ids[0]))
    rows_read = blocks * args.block * args.layers * HEADS * DIM * 4
    floor = (rows_read + pages * store.layout.page_bytes) / bandwidth * 1e3
    row = dict(
        case="compact", format=names, blocks=blocks, block_tokens=args.block, layers=args.layers, ms=ours,
        launch_ms=launch, floor_ms=floor, digest_of_one_block=digest,
    )  # fmt: skip
    if blocks > 1:
        move_time(store, ids, tiers, ops.compact.reference, 1)
        row["torch_ms"], _ = move_time(store, ids, tiers, ops.compact.reference, 1)
    if len(names.split("+")) == 1:
        refill(store, ids)
        row["quota_plan_ms"] = plan_time(store, ids, args)
    else:
        row |= tiered(store, ids, tiers)
    return row


def model_times(args) -> list[dict]:
    """Modeled milliseconds of a prefill and of a decode step of an 8B-shaped model."""
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
    """Overheads of the first format: packing a prompt over its prefill, and packing during a decode step over the
    step."""
    moves = [r for r in rows if r["case"] == "compact"]
    model = {r["name"]: r["ms"] for r in rows if r["case"] == "model"}
    if not moves or len(model) < 2:
        return {}
    by_blocks = {r["blocks"]: r for r in moves if r["format"] == moves[0]["format"]}
    prompt, out = by_blocks[max(by_blocks)], {}
    out["compaction.prefill_overhead"] = (prompt["ms"] / model["prefill"], "share of a modeled prefill")
    if 1 in by_blocks:
        # Blocks fill at random steps, so a move usually has one block. `step`: time in which the batch fills one block.
        one, step = by_blocks[1], model["decode step"] * by_blocks[1]["block_tokens"] / batch
        out["compaction.decode_overhead"] = (one["ms"] / step, "share of a modeled decode step")
        exposed = max(one["ms"], one["launch_ms"]) / step
        out["compaction.decode_overhead_exposed"] = (exposed, "share of a modeled decode step, launches not hidden")
        for r in (r for r in moves if r["blocks"] == 1 and "again_ms" in r):
            parts = sum(r[key] for key in ("ms", "plan_ms", "plan_again_ms", "again_ms"))
            unit = "share of a modeled decode step, packed again once"
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
            if not budget.exceeded(f"{names}, {blocks} blocks"):
                results.add(measure(names, blocks, args, bandwidth))
                torch.cuda.empty_cache()
    results.score(scores(results.rows, args.batch))
    print(table(results.rows, COLUMNS))
    budget.show()
    results.show()


if __name__ == "__main__":
    main()
