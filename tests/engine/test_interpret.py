"""The backend's GPU operations, layer by layer, against its CPU operations, both under the interpreter."""

import functools

import pytest
import torch
from triton.runtime import interpreter

from kvc_kernels import ops
from sglang_kvc.engine.attention import Attention, Snapshot
from tests.support.pages import KernelStore, TorchStore, block_formats_of, fill, make_store, random_kv

P, SCALE = 32, 0.1
ROWS = torch.tensor([[3, 1, 4], [2, 5, 0]])
PREFIX, NEW = [40, 32], [30, 3]


def both(has_scores, device="cpu", **options):
    """The engines (reference, kernels) over equal stores with cached prefixes; the first block of request 0 is
    packed."""
    store = make_store(block_formats_of("k4v4"), head_dim=64, block_tokens=P, layers=2, blocks=8, has_scores=has_scores)
    store.pages.zero_()
    ops.take_bf16(store, torch.tensor([4, 5]))
    for r in (0, 1):
        fill(store, ROWS[r, : -(-PREFIX[r] // P)], *random_kv(store, PREFIX[r], seed=r))
    ops.compact(store, ROWS[:1, 0], 1, ops.keep_all(1, store.layout), from_format=0)
    stores = [
        kind(**{n: x.to(device, copy=True) if isinstance(x, torch.Tensor) else x for n, x in vars(store).items()})
        for kind in (TorchStore, KernelStore)
    ]
    options = {"sampling": None, "fake_quant_format": None, **options}
    sizes = {"query_heads": 4, "max_batch": 4, "max_blocks": 4}
    return tuple(Attention(x, **options, **sizes) for x in stores)


def step(engines, kind, lens, prefix=None):
    """One layer of one forward by both engines: their outputs must agree."""
    new = [1] * len(lens) if prefix is None else [n - p for n, p in zip(lens, prefix)]
    rows = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(new))
    at = torch.cat([torch.arange(n - x, n) for n, x in zip(lens, new)])
    gen = torch.Generator().manual_seed(sum(lens))
    q, k, v = (torch.randn((len(at), h, 64), generator=gen).bfloat16() for h in (4, 2, 2))
    outs = []
    for engine in engines:
        if prefix is None:
            # The server's table, with a row that no request uses.
            slots = (ROWS.repeat_interleave(P, 1) * P + torch.arange(3 * P) % P).int()
            engine.plan_decode(torch.cat((slots[:1], slots)), torch.tensor([1, 2]), torch.tensor(lens), lens)
        else:
            engine.plan_extend(
                Snapshot(
                    ROWS, torch.tensor(lens), ROWS[rows, at // P], at % P, lens, prefix, new, waiting_cpu=[[], [0]]
                )
            )
        outs.append(getattr(engine, kind)(1, q, k, v, scale=SCALE, logit_cap=0.0).double())
    want, got = outs
    assert (got - want).norm() < 0.02 * want.norm()


@pytest.mark.parametrize("case", ["plain", "sampling", "stored"])
def test_kernels_match_reference_in_extend_and_decode(case):
    options = {}
    if case == "sampling":
        options["sampling"] = ops.ScoreSampling(window=8, decode_stride=2)
    if case == "stored":
        options["fake_quant_format"] = block_formats_of("k4v4")[1].high
    engines = both(case == "sampling", **options)
    total = [p + n for p, n in zip(PREFIX, NEW)]
    step(engines, "extend", total, PREFIX)
    step(engines, "decode", [n + 1 for n in total])
    if case == "sampling":
        a, b = (ops.block_scores(e.store, torch.tensor([1, 2, 3, 4, 5])) for e in engines)
        assert a[:, 1].max() > 0.05
        assert torch.allclose(a, b, atol=5e-3 * float(a.max()), rtol=0.03)


def replays(capture, sampling, device="cpu"):
    """Check that a captured decode step serves later steps of its batch size with other lengths, blocks and formats.

    `capture(fn)` -> (the result of fn, a function that repeats its launches without our Python code). As in SGLang, the
    step is captured with padding only and replayed with a row of padding after the two requests.
    """
    reference, kernels = both(True, device, sampling=sampling)
    gen = torch.Generator().manual_seed(3)
    q, k, v = (torch.zeros((3, heads, 64), dtype=torch.bfloat16, device=device) for heads in (4, 2, 2))
    # The server's table, with the row of padding first.
    rows = torch.cat((torch.zeros_like(ROWS[:1]), ROWS)).to(device)
    table = (rows.repeat_interleave(P, 1) * P + torch.arange(3 * P, device=device) % P).int()
    none = torch.zeros(3, dtype=torch.int64, device=device)
    kernels.plan_decode(table, none, none + 1, [1] * 3)
    out, replay = capture(lambda: kernels.decode(1, q, k, v, scale=SCALE, logit_cap=0.0))
    for turn in range(3):
        lens = [n + 1 + turn for n in PREFIX] + [1]
        if turn == 2:
            for engine in (reference, kernels):
                ops.compact(
                    engine.store, rows[2:, 0], 1, ops.keep_all(1, engine.store.layout).to(device), from_format=0
                )
        snap = table, torch.tensor([1, 2, 0], device=device), torch.tensor(lens, device=device), lens
        for x in (q, k, v):
            x.copy_(torch.randn(x.shape, generator=gen))
        reference.plan_decode(*snap)
        want = reference.decode(1, q, k, v, scale=SCALE, logit_cap=0.0)[:2].double()
        kernels.plan_decode(*snap)
        replay()
        assert (out[:2].double() - want).norm() < 0.02 * want.norm()
    a, b = (ops.block_scores(e.store, rows[1:].flatten()[:5]) for e in (reference, kernels))
    assert a[:, 1].max() > 0.05 and b[:, 0].max() == 0
    assert torch.allclose(a, b, atol=5e-3 * float(a.max()), rtol=0.03)


@pytest.mark.parametrize("reduce", ["max", "sum"])
def test_captured_decode_step_serves_later_steps(monkeypatch, reduce):
    """A CUDA graph holds the launches of a step, with their addresses and numbers."""
    launches, run = [], interpreter.InterpretedFunction.run

    def record(self, *args, **kwargs):
        launches.append(functools.partial(run, self, *args, **kwargs))
        return launches[-1]()

    def capture(step):
        with monkeypatch.context() as patched:
            patched.setattr(interpreter.InterpretedFunction, "run", record)
            out = step()
        return out, lambda: [launch() for launch in launches]

    replays(capture, ops.ScoreSampling(reduce=reduce, decode_stride=1 if reduce == "max" else 2))
    assert len(launches) == 4  # append, attend, merge, collect
