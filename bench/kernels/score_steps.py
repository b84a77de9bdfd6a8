"""Sweep of launch parameters for collecting attention scores in decode steps of 64 requests of 8K tokens.

    python -m bench.kernels.score_steps [--out FILE]

The scoreboard's figures come first: times of the served parameters, and of a layer's attention and matrix products. The
sweep has times by sampling stride, and each row has the largest difference of its scores from those of the first row.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

import torch

from kvc_kernels.scores.decode_kernel import StepTuning
from kvc_kernels.scores.prefill_kernel import AttentionScores
from kvc_kernels.scores.reference import ScoreSampling

from . import collecting, extend
from .common import RESULTS, Results, time_graph
from .extend_stock import GROUP, HEADS, SCALE

BATCH, TOKENS, STRIDES = 64, 8192, (1, 16, 32)
TUNINGS = (
    StepTuning(),
    StepTuning(programs=6, max_registers=168),
    StepTuning(warps=4, programs=4),
    StepTuning(tile=64, tiles=2, warps=1, programs=12, max_registers=168),
    StepTuning(tile=64, tiles=1, warps=1, programs=12, max_registers=168),
    StepTuning(tile=64, tiles=1, warps=1, programs=16, max_registers=128),
)


def scores(store) -> torch.Tensor:
    """Scores in the pages of the packed format, an fp32 view `[pages, tokens]`."""
    at, size = store.layout.page(store.block_formats[1].high).segments["scores"]
    return store.pages.view(torch.float32)[:, at // 4 : (at + size) // 4]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=str(RESULTS / "score_steps.json"))
    args = parser.parse_args()
    results = Results(args.out)
    results.add(*collecting.decode_rows(BATCH, TOKENS))
    results.score(extend.scores(results.rows))
    store, rows, lens, q = collecting.sampled_step(BATCH, TOKENS)
    lse = torch.full((BATCH, HEADS * GROUP), 20.0, device="cuda")
    first = None
    for tuning in TUNINGS:
        ms_by_stride = {}
        for stride in STRIDES:
            op = AttentionScores(
                store, query_heads=HEADS * GROUP, sampling=ScoreSampling(reduce="sum", power=2, decode_stride=stride),
                max_batch=BATCH, max_blocks=rows.shape[1], step=tuning,
            )  # fmt: skip
            op.plan_decode(rows, lens)
            if stride == 1:
                scores(store)[...] = 0  # the pages start with random bytes
                op.add(0, q, lse, scale=SCALE)
                collected = scores(store).clone()
                first = collected if first is None else first
            ms_by_stride[stride] = time_graph(lambda _, op=op: op.add(0, q, lse, scale=SCALE))
        row = dict(case="sweep", **asdict(tuning), difference=float((collected - first).abs().max() / first.max()))
        results.add(row | dict(ms_by_stride=ms_by_stride))
        print(results.rows[-1], flush=True)


if __name__ == "__main__":
    main()
