"""What the backend runs on a GPU, layer by layer, against what it runs on a CPU; both here under the interpreter."""

import copy

import pytest
import torch

from kvc_kernels import ops
from sglang_kvc.attention import Snapshot, TorchAttention, TritonAttention

from ..ops.support import fill, make_store, random_kv, rungs

P, SCALE = 32, 0.1
ROWS = torch.tensor([[3, 1, 4], [2, 5, 0]])
PREFIX, NEW = [40, 32], [30, 3]


def both(scored, **options):
    """(reference, kernels) over equal stores: cached prefixes, the first block of request 0 packed."""
    store = make_store(rungs("k4v4"), head_dim=64, block_tokens=P, layers=2, blocks=8, scored=scored)
    store.pages.zero_()
    ops.take_bf16(store, torch.tensor([4, 5]))
    for r in (0, 1):
        fill(store, ROWS[r, : -(-PREFIX[r] // P)], *random_kv(store, PREFIX[r], seed=r))
    ops.compact(store, ROWS[:1, 0], 1, ops.keep_all(1, store.layout), from_rung=0)
    mine = copy.copy(store)
    mine.pages = store.pages.clone()
    options = {"observe": None, "stored_as": None, **options}
    return TorchAttention(store, **options), TritonAttention(
        mine, **options, query_heads=4, max_batch=4, max_blocks=4
    )


def step(engines, kind, lens, prefix=None):
    """One layer of one forward by both engines: their outputs must agree."""
    new = [1] * len(lens) if prefix is None else [n - p for n, p in zip(lens, prefix)]
    rows = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(new))
    at = torch.cat([torch.arange(n - x, n) for n, x in zip(lens, new)])
    gen = torch.Generator().manual_seed(sum(lens))
    q, k, v = (torch.randn((len(at), h, 64), generator=gen).bfloat16() for h in (4, 2, 2))
    snap = Snapshot(
        ROWS, torch.tensor(lens), ROWS[rows, at // P], at % P, lens, prefix, prefix and new,
        waiting_cpu=None if prefix is None else [[], [0]],
    )  # fmt: skip
    outs = []
    for engine in engines:
        getattr(engine, f"plan_{kind}")(snap)
        outs.append(getattr(engine, kind)(1, q, k, v, scale=SCALE, logit_cap=0.0).double())
    want, got = outs
    assert (got - want).norm() < 0.02 * want.norm()


@pytest.mark.parametrize("case", ["plain", "observe", "stored"])
def test_extend_and_decode(case):
    options = {}
    if case == "observe":
        options["observe"] = ops.Observe(window=8)
    if case == "stored":
        options["stored_as"] = rungs("k4v4")[1].high
    engines = both(case == "observe", **options)
    total = [p + n for p, n in zip(PREFIX, NEW)]
    step(engines, "extend", total, PREFIX)
    step(engines, "decode", [n + 1 for n in total])
    if case == "observe":
        a, b = (ops.block_scores(e.store, torch.tensor([1, 2, 3, 4, 5])) for e in engines)
        assert a[:, 1].max() > 0.05
        assert torch.allclose(a, b, atol=5e-3 * float(a.max()), rtol=0.03)
