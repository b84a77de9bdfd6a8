"""Layers with a sliding window under the interpreter: decode against float64, prefills against the torch reference."""

import pytest
import torch

from kvc_kernels import ops
from kvc_kernels.decode.attention import DecodeAttention, Tuning
from kvc_kernels.decode.planner import DecodePlan
from kvc_kernels.extend.windowed import WindowedExtend, cut
from sglang_kvc.engine.attention import Attention, Snapshot
from tests.kernels.common.test_window_reference import NEW, PREFIX, ROWS, WAITING, P, error, queries, request_case
from tests.support.decode import make_case, relative_error
from tests.support.pages import KernelStore, TorchStore

from .test_interpret_fake_quant import Dense

BAR = 3e-3  # the output's bf16 rounding alone is 1.1e-3
LENS = (193, 1, 128, 70)


def decode(case, window, *, tile=32, columns=5, **kw):
    store, q, rows, lens = case
    op = DecodeAttention(
        store, max_batch=len(lens) + 1, max_blocks=rows.shape[1] + 1, query_heads=q.shape[1],
        tuning=Tuning(tile=tile), columns=columns, window=window,
    )  # fmt: skip
    op.plan(rows, lens)
    out = torch.full_like(q, torch.nan)
    kw["scale"] = q.shape[-1] ** -0.5
    op.run(1, q, out=out, **kw)
    return relative_error(out, store, 1, q, rows, lens, window=window, **kw)


@pytest.mark.parametrize("window", [0, 1, 15, 31, 63, 64, 65, 100, 127, 191, 500])
def test_decode_windows(window):
    assert decode(make_case("k4v4", lens=LENS, keep_all=True), window) < BAR


@pytest.mark.parametrize("names", [("k8v8",), ("k2v2",), ("k4v4", "k8v4"), ()])
def test_decode_formats(names):
    assert decode(make_case(*names, lens=LENS, keep_all=True, seed=3), 77) < BAR


@pytest.mark.parametrize("tile, page", [(16, 2880), (64, 2880), (64, 1440)])
def test_decode_with_tiles_and_pages_of_unrelated_sizes(tile, page):
    for window in (20, 90):
        assert decode(make_case("k4v4", lens=LENS, page_bytes=page, keep_all=True), window, tile=tile) < BAR


@pytest.mark.parametrize("columns", [1, 2, 50])
def test_decode_with_more_blocks_than_a_chunk(columns):
    case = make_case("k4v4", lens=(40 * 16 + 3, 36 * 16), block_tokens=16, dtype=torch.float16, keep_all=True)
    assert decode(case, 36 * 16 - 5, tile=16, columns=columns) < BAR


def test_decode_with_logit_cap_and_head_dim_256():
    assert decode(make_case("k4v4", lens=(150, 64), head_dim=256, heads=1, keep_all=True), 40, logit_cap=2.0) < BAR


def test_decode_plan_lists_only_blocks_in_window():
    store, _, rows, _ = make_case("k4v4", "k4v2", lens=(64 * 9, 64 * 4, 64 * 7, 64), keep_all=True)
    p, gen = store.layout.block_tokens, torch.Generator().manual_seed(1)
    for window in (0, 63, 64, 200, 1000):
        lens = torch.randint(0, p * rows.shape[1] + 1, (len(rows),), generator=gen).int()
        plan = DecodePlan(store, len(rows) + 1, rows.shape[1] + 1, columns=7, window=window)
        plan.update(store, rows, lens)
        for b, row in enumerate(rows):
            n, want = int(lens[b]), [[] for _ in plan.classes]
            for j, block in enumerate(row[: -(-n // p)].tolist()):
                seen = [t for t in range(j * p, min(n, j * p + p)) if t >= n - 1 - window]
                for c in range(len(plan.classes)):
                    if seen and int(plan.class_masks[int(store.format_id[block])]) >> c & 1:
                        want[c].append((block, seen[0] - j * p, min(p, n - j * p)))
            got = [plan.lists[b, c, : plan.sizes[b, c]].tolist() for c in range(len(plan.classes))]
            assert [[(x >> 32, x >> 16 & 0xFFFF, x & 0xFFFF) for x in xs] for xs in got] == want


class WindowedDense(Dense):
    """Stands in for `StagedPrefill` with a window."""

    def __init__(self, window):
        self.window = window

    def run(self, q, k, v, into, *, scale, logit_cap):
        at = 0
        for n, slots, last in self.runs:
            keys, values = (x[slots].flatten(0, 1)[: (len(slots) - 1) * P + last] for x in (k, v))
            seen = torch.ones(n, len(keys)).tril(len(keys) - n).triu(len(keys) - n - self.window).bool()
            into[0][at : at + n] = self.attend(q[at : at + n], keys, values, seen, scale, logit_cap)[0]
            at += n


def extend(store, q, window, *, exact=None, stored=True, fake=False, cap=0.0, layer=1, **kw):
    """(worst row's error against the torch reference, output) of one forward on poisoned slots."""
    fmt = store.block_formats[1].high if stored else None
    op = WindowedExtend(store, query_heads=q.shape[1], window=window, fake_quant_format=fmt, **kw)
    if fake:
        op.prefills = [WindowedDense(window) for _ in range(8)]
    op.plan(ROWS, PREFIX, NEW, WAITING if stored else None, exact and [None if x else fmt for x in exact])
    op.staged.k.fill_(torch.nan)
    op.staged.v.fill_(torch.nan)
    out = op.run(layer, q, q, q, scale=0.125, logit_cap=cap)
    seen = [None if exact and exact[r] else fmt for r in range(len(NEW))]
    want = ops.extend_attention(
        store, layer, q, ROWS, PREFIX, NEW, scale=0.125, logit_cap=cap, fake_quant_format=seen, window=window
    )
    return error(out, want.double()), out


@pytest.mark.parametrize("window", [0, 1, 20, 31, 32, 50, 70, 1000])
@pytest.mark.parametrize("fake", [False, True])
def test_extend_windows(window, fake):
    assert extend(request_case(), queries(4), window, fake=fake)[0] < 0.02


@pytest.mark.parametrize(
    "spec, group, dtype",
    [
        ("k8v4", 7, torch.bfloat16),
        ("k2v2", 1, torch.float16),
        ("k4v2", 3, torch.bfloat16),
    ],
)
def test_extend_formats(spec, group, dtype):
    store = request_case(spec, dtype)
    assert extend(store, queries(group, dtype), 45, cap=20.0)[0] < 0.02


@pytest.mark.parametrize("fake", [False, True])
def test_extend_of_exact_requests(fake):
    store, q = request_case(), queries(2)
    assert extend(store, q, 50, exact=[False, True, True, False, False], fake=fake)[0] < 0.02
    assert extend(store, q, 50, stored=False, fake=fake)[0] < 0.02


@pytest.mark.parametrize("stored", [False, True])
def test_number_of_passes_does_not_change_output(stored):
    store, q = request_case(), queries(2)
    one_pass = extend(store, q, 50, stored=stored)[1]
    for tokens in (P, 8 * P):
        worst, out = extend(store, q, 50, stored=stored, pass_tokens=tokens)
        assert torch.equal(out, one_pass) and worst < 0.02


def test_extend_with_head_dim_256():
    store = request_case(dim=256, heads=1)
    assert extend(store, queries(2, dim=256, heads=1), 40)[0] < 0.02


def test_passes_cover_every_run_once_within_staging_limit():
    for window in (0, 40, 300):
        for fake_quantized in (False, True):
            args = PREFIX, NEW, WAITING, [fake_quantized] * len(NEW)
            for limit in (1, 6, 12, 100):
                passes = cut(*args, p=P, window=window, max_slots=limit)
                assert sum(sum(x.tokens) for x in passes) == sum(NEW)
                for x in passes:
                    filled = [i[2] for i in x.pages] + [s for i in x.rows for s in i[2:4] if s >= 0]
                    assert sorted(filled) == list(range(x.size))
                    assert {s for run_slots in x.slots for s in run_slots} <= set(filled)
                    assert x.size <= limit or len({i[0] for i in x.pages + x.rows}) == 1
    assert cut([], [], None, [], p=P, window=3, max_slots=5) == []


def test_tiers_are_rejected():
    store = make_case("k8v4+k4v2", lens=(64,))[0]
    with pytest.raises(ValueError, match="keep every token"):
        WindowedExtend(store, query_heads=8, window=4)


def moved(store, device, kind):
    fields = {n: x.to(device, copy=True) if isinstance(x, torch.Tensor) else x for n, x in vars(store).items()}
    return kind(**fields)


def by_turns(level, device, *, dim, times, window=150):
    """Layers with and without a window and decode after extend, by the GPU's operations and by plain torch."""
    store = request_case(dim=dim, times=times)
    fmt, p = store.block_formats[1].high, store.layout.block_tokens
    prefix, new = ([times * n for n in x] for x in (PREFIX, NEW))
    lens, table = [a + b for a, b in zip(prefix, new)], ROWS.clone()
    # The last request ends with its block and continues in another.
    table[4, lens[4] // p] = 17
    ops.take_bf16(store, torch.tensor([17]))
    engines = [
        Attention(there, None, fmt, query_heads=6, max_batch=6, max_blocks=8, windows=(window,))
        for there in (moved(store, "cpu", TorchStore), moved(store, device, KernelStore))
    ]
    gen = torch.Generator().manual_seed(1)
    at = [(r, i) for r in range(5) for i in range(prefix[r], lens[r])]
    blocks, offsets = torch.tensor([int(table[r, i // p]) for r, i in at]), torch.tensor([i % p for _, i in at])
    levels = [fmt, None, fmt, fmt, None] if level else None
    slots = (table.repeat_interleave(p, 1) * p + torch.arange(p).repeat(6)).int()
    for layer, seen in ((0, -1), (1, window), (0, window)):
        # Queries of a decode step with their own memory order, as models may pass them.
        rows = [torch.randn((len(at), h, dim), generator=gen).bfloat16() for h in (6, 2, 2)]
        step = [torch.randn((h, 5, dim), generator=gen).bfloat16().transpose(0, 1) for h in (6, 2, 2)]
        outs = []
        for engine in engines:
            on = engine.store.device
            engine.plan_extend(
                Snapshot(
                    table.to(on), torch.tensor(lens, device=on), blocks.to(on), offsets.to(on), lens, prefix, new,
                    levels, WAITING,
                )
            )  # fmt: skip
            options = {"scale": 0.09, "logit_cap": 0.0, "window": seen}
            outs.append([engine.extend(layer, *(x.to(on) for x in rows), **options)])
            ends = torch.tensor(lens, device=on) + 1
            engine.plan_decode(slots.to(on), torch.arange(5, device=on), ends, ends.tolist())
            outs[-1].append(engine.decode(layer, *(x.to(on) for x in step), **options))
        for want, got in zip(*outs):
            assert error(got, want.double()) < 0.03


@pytest.mark.parametrize("level", [True, False])
def test_layers_alternate_as_in_server(level):
    by_turns(level, "cpu", dim=64, times=1, window=40)
