"""Layers with a sliding window on the GPU: decode against float64, prefills against float64 over the stored rows."""

import pytest
import torch

from kvc_kernels.store import PageStore
from tests.kernels.common.test_window_reference import (
    NEW,
    PREFIX,
    ROWS,
    WAITING,
    error,
    queries,
    reference,
    request_case,
)
from tests.kernels.decode.test_gpu import replays
from tests.support.decode import make_case, relative_error
from tests.support.libraries import skip_without

from .test_interpret_windowed import by_turns, moved

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BAR = 3e-3  # the output's bf16 rounding alone is 1.1e-3
LENS = (3 * 128 + 77, 1, 512, 130)
TIMES = 4  # blocks of 128


def build(case, window, columns=5, **tuning):
    from kvc_kernels.decode.attention import DecodeAttention, Tuning

    store, q, rows, lens = case
    return DecodeAttention(
        store, max_batch=len(lens) + 1, max_blocks=rows.shape[1] + 1, query_heads=q.shape[1], columns=columns,
        window=window, tuning=Tuning(**tuning),
    )  # fmt: skip


def decode(case, window, *, logit_cap=0.0, **options):
    store, q, rows, lens = case
    op = build(case, window, **options)
    op.plan(rows, lens)
    out, scale = torch.full_like(q, torch.nan), q.shape[-1] ** -0.5
    op.run(1, q, scale=scale, logit_cap=logit_cap, out=out)
    return relative_error(out, store, 1, q, rows, lens, scale=scale, logit_cap=logit_cap, window=window)


@pytest.mark.parametrize("window", [0, 63, 128, 300, 5000])
def test_decode_windows(window):
    case = make_case("k4v4", head_dim=128, block_tokens=128, lens=LENS, keep_all=True, device="cuda")
    assert decode(case, window) < BAR


@pytest.mark.parametrize("names", [("k8v8",), ("k2v2",), ("k4v4", "k8v4"), ()])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_decode_formats(names, head_dim):
    case = make_case(*names, head_dim=head_dim, block_tokens=128, lens=LENS, keep_all=True, device="cuda")
    assert decode(case, 190, logit_cap=2.0 if head_dim == 256 else 0.0) < BAR


@pytest.mark.parametrize("group, columns", [(1, 1), (7, None), (16, 1)])
def test_decode_of_more_blocks_than_a_chunk(group, columns):
    case = make_case(
        "k4v4", lens=(80 * 64 + 5, 64 * 33), head_dim=128, group=group, keep_all=True, device="cuda",
        dtype=torch.float16,
    )
    assert decode(case, 64 * 40 + 9, columns=columns) < BAR


def test_decode_graph_replays_with_other_lengths_and_blocks():
    case = make_case("k4v4", head_dim=128, block_tokens=128, lens=(1000, 900, 512, 300), keep_all=True, device="cuda")
    replays(case, build(case, 300, columns=40), window=300)


def ragged(store, query_heads, library):
    from kvc_kernels.extend.dense_prefill import ragged_prefill

    g = store.layout
    return ragged_prefill(
        torch.device("cuda"), library, query_heads=query_heads, heads=g.heads, head_dim=g.head_dim, dtype=store.dtype
    )


def extend(store, q, window, *, exact=None, stored=True, dense="auto", cap=0.0, **options):
    """Worst row's error and output of one forward on poisoned slots."""
    from kvc_kernels.extend.windowed import WindowedExtend

    prefix, new = ([TIMES * n for n in x] for x in (PREFIX, NEW))
    fmt = store.block_formats[1].high if stored else None
    gpu_store, rows = moved(store, "cuda", PageStore), ROWS.cuda()
    skip_without(dense)
    options["ragged"] = ragged(store, q.shape[1], dense)
    op = WindowedExtend(gpu_store, query_heads=q.shape[1], window=window, fake_quant_format=fmt, **options)
    assert bool(op.prefills) == (dense != "none")
    scale = q.shape[-1] ** -0.5
    op.plan(rows, prefix, new, WAITING if stored else None, exact and [None if x else fmt for x in exact])
    op.staged.k.fill_(torch.nan)
    op.staged.v.fill_(torch.nan)
    out = op.run(1, *3 * [q.cuda()], scale=scale, logit_cap=cap)
    seen = [None if exact and exact[r] else fmt for r in range(len(new))]
    want = reference(store, 1, q, ROWS, prefix, new, window=window, scale=scale, cap=cap, fake_quant_format=seen)
    return error(out, want), out


@pytest.mark.parametrize("dense", ["fa3", "flashinfer", "none"])
@pytest.mark.parametrize("window", [0, 127, 300, 5000])
def test_extend_windows(dense, window):
    store = request_case(dim=128, times=TIMES)
    assert extend(store, queries(4, dim=128, times=TIMES), window, dense=dense)[0] < 0.03


@pytest.mark.parametrize("dense", ["fa3", "flashinfer", "none"])
@pytest.mark.parametrize(
    "spec, dim, dtype, cap",
    [
        ("k8v4", 128, torch.float16, 0.0),
        ("k4v4", 256, torch.bfloat16, 0.0),
        ("k4v4", 256, torch.bfloat16, 20.0),
        ("k2v2", 64, torch.bfloat16, 0.0),
    ],
)
def test_extend_formats(dense, spec, dim, dtype, cap):
    store = request_case(spec, dtype, dim=dim, times=TIMES)
    q = queries(3, dtype, dim=dim, times=TIMES)
    assert extend(store, q, 190, dense=dense, cap=cap)[0] < 0.03


@pytest.mark.parametrize("dense", ["fa3", "flashinfer", "none"])
def test_extend_of_requests_that_see_blocks_as_they_are(dense):
    store, q = request_case(dim=128, times=TIMES), queries(2, dim=128, times=TIMES)
    exact = [False, True, True, False, False]
    assert extend(store, q, 200, exact=exact, dense=dense)[0] < 0.03
    assert extend(store, q, 200, stored=False, dense=dense)[0] < 0.03


@pytest.mark.parametrize("dense", ["fa3", "flashinfer", "none"])
def test_passes_and_repeats_change_nothing(dense):
    store, q = request_case(dim=128, times=TIMES), queries(2, dim=128, times=TIMES)
    worst, one_pass = extend(store, q, 200, dense=dense)
    assert worst < 0.03
    for tokens in (128, 1024):
        assert torch.equal(extend(store, q, 200, dense=dense, pass_tokens=tokens)[1], one_pass)


def test_no_sync():
    """Planning and running never wait for the device."""
    from kvc_kernels.extend.windowed import WindowedExtend

    store = moved(request_case(dim=128, times=TIMES), "cuda", PageStore)
    q = queries(2, dim=128, times=TIMES).cuda()
    library = ragged(store, 4, "auto")
    op = WindowedExtend(store, query_heads=4, window=200, fake_quant_format=store.block_formats[1].high, ragged=library)
    rows, lens = ROWS.cuda(), ([TIMES * n for n in x] for x in (PREFIX, NEW))
    lens = tuple(lens)
    try:
        for _ in range(3):
            op.plan(rows, *lens, WAITING)
            op.run(0, q, q, q, scale=0.1)
            torch.cuda.set_sync_debug_mode("error")
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("level", [True, False])
def test_as_the_server_calls_it(level):
    by_turns(level, "cuda", dim=128, times=TIMES)
