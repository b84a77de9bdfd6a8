"""Launch parameters of collecting attention in decode steps: what a layer of 64 requests of 8K tokens takes.

    python -m bench.kernels.score_steps [--out FILE]

First what is served, beside the attention and the products of a layer, for the scoreboard; then others, by how many
steps one is looked at (`stride`).
"""

from __future__ import annotations

import argparse
import itertools

import torch

from kvc_kernels.ops import score_columns_triton as columns
from kvc_kernels.ops.observe import Observe

from . import extend
from .common import RESULTS, Results, time_graph
from .extend import GROUP, HEADS, SCALE

BATCH, TOKENS, STRIDES = 64, 8192, (1, 16, 32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=str(RESULTS / "score_steps.json"))
    args = parser.parse_args()
    results = Results(args.out)
    results.add(*extend.collecting_steps(BATCH, TOKENS))
    results.score(extend.scores(results.rows))
    store, rows, lens, q = extend.observed_step(BATCH, TOKENS)
    lse = torch.full((BATCH, HEADS * GROUP), 20.0, device="cuda")
    for warps, tile, programs, splits in itertools.product((1, 2, 4), (64, 128), (4, 8, 16), (16, 64)):
        columns.STEP_WARPS, columns.STEP_PROGRAMS, columns.STEP_SPLITS = warps, programs, splits
        took = {}
        for stride in STRIDES:
            op = columns.ReceivedAttention(
                store, query_heads=HEADS * GROUP, observe=Observe(reduce="sum", power=2, decode_stride=stride),
                max_batch=BATCH, max_blocks=rows.shape[1], tile=tile,
            )  # fmt: skip
            op.plan_decode(rows, lens)
            took[stride] = time_graph(lambda _, op=op: op.add(0, q, lse, scale=SCALE))
        row = dict(case="sweep", warps=warps, tile=tile, programs_per_sm=programs, splits=splits)
        results.add(row | dict(ms_by_stride=took))
        print(results.rows[-1], flush=True)


if __name__ == "__main__":
    main()
