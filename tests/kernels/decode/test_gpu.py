"""Decode attention on the GPU against a float64 reading of the same pages: all engines, graphs, no syncs."""

import pytest
import torch

from tests.support.decode import make_case, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BAR = 3e-3  # the output's bf16 rounding alone is 1.1e-3
ENGINES = pytest.mark.parametrize("engine", ["triton", "gluon"])


def build(case, engine, **kw):
    from kvc_kernels.decode.attention import DecodeAttention, Tuning

    store, q, rows, lens = case
    columns = kw.pop("columns", 5)
    return DecodeAttention(
        store, max_batch=len(lens) + 1, max_blocks=rows.shape[1] + 1, query_heads=q.shape[1],
        tuning=Tuning(engine=engine, **kw), columns=columns,
    )  # fmt: skip


def run(case, engine, *, logit_cap=0.0, **kw):
    store, q, rows, lens = case
    op = build(case, engine, **kw)
    op.plan(rows, lens)
    out = torch.full_like(q, torch.nan)
    scale = q.shape[-1] ** -0.5
    op.run(1, q, scale=scale, logit_cap=logit_cap, out=out)
    return relative_error(out, store, 1, q, rows, lens, scale=scale, logit_cap=logit_cap)


@ENGINES
@pytest.mark.parametrize("spec", ["k8v8", "k8v4", "k4v8", "k4v4", "k4v2", "k2v2", "k8v4+k4v2"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_formats(engine, spec, head_dim):
    case = make_case(spec, head_dim=head_dim, block_tokens=256, lens=(3 * 256 + 77, 1, 512), device="cuda")
    assert run(case, engine) < BAR


@ENGINES
@pytest.mark.parametrize("spec", ["k8v8", "k4v4", "k2v2", "k8v4+k4v2"])
def test_keys_per_token(engine, spec):
    case = make_case(
        spec, head_dim=128, block_tokens=128, lens=(300, 128), has_scores=True, device="cuda"
    )
    assert run(case, engine) < BAR


@ENGINES
@pytest.mark.parametrize("group", [1, 3, 7, 8, 12, 16])
def test_groups(engine, group):
    case = make_case("k4v4", group=group, head_dim=128, block_tokens=128, lens=(300, 128), device="cuda")
    assert run(case, engine) < BAR


@ENGINES
def test_logit_cap(engine):
    case = make_case("k4v4", head_dim=128, lens=(150, 64), device="cuda")
    assert run(case, engine, logit_cap=2.0) < BAR


@ENGINES
@pytest.mark.parametrize("tile", [16, 32, 64])
@pytest.mark.parametrize("tokens", [16, 48, 80, 112])
def test_pages_of_any_size(engine, tile, tokens):
    page = tokens * 132 // 16 * 16
    case = make_case("k4v4", head_dim=128, block_tokens=128, lens=(300, 128), page_bytes=page, device="cuda")
    assert case[0].layout.page(case[0].block_formats[1].high).tokens == tokens
    assert run(case, engine, tile=tile) < BAR


@ENGINES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page", [3 * 2048, 8192])
def test_uncompressed_blocks_only(engine, dtype, page):
    case = make_case(head_dim=128, block_tokens=256, lens=(1000, 256, 1), page_bytes=page, dtype=dtype, device="cuda")
    assert run(case, engine) < BAR


@ENGINES
def test_several_formats_and_more_blocks_than_a_chunk(engine):
    case = make_case(
        "k8v4+k4v2", "k4v4", "k4v2", head_dim=128, lens=(80 * 64 + 5, 64 * 33), device="cuda", dtype=torch.float16
    )
    for columns in (1, 4, 1000):
        assert run(case, engine, columns=columns) < BAR


@ENGINES
def test_default_columns_and_repeated_runs_agree_to_the_bit(engine):
    case = make_case("k4v4", head_dim=128, heads=8, block_tokens=256, lens=(5000, 700, 256), device="cuda")
    assert run(case, engine, columns=None) < BAR
    op = build(case, engine, columns=None)
    _, q, rows, lens = case
    op.plan(rows, lens)
    first = op.run(0, q, scale=0.1)
    assert all(torch.equal(first, op.run(0, q, scale=0.1)) for _ in range(5))


@ENGINES
def test_graph_replays_with_other_lengths_blocks_and_formats(engine):
    case = make_case(
        "k4v4", "k8v4+k4v2", head_dim=128, block_tokens=128, lens=(1000, 900, 512, 300), device="cuda"
    )
    replays(case, build(case, engine, columns=40))


def replays(case, op, **options):
    """A captured step without a sync serves later ones; `options` of `relative_error`."""
    store, q, rows, lens = case
    rows, lens = rows.clone(), lens.clone()
    out = torch.empty_like(q)
    op.plan(rows, lens)
    op.run(0, q, scale=0.1, out=out)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            op.plan(rows, lens)
            op.run(0, q, scale=0.1, out=out)
            op.run(1, q, scale=0.1, out=out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    gen = torch.Generator().manual_seed(3)
    for _ in range(3):
        # Whole blocks only: the last block of another request may be packed.
        lens.copy_(torch.randint(1, rows.shape[1] + 1, (len(rows),), generator=gen) * 128)
        rows.copy_(rows[torch.randperm(len(rows), generator=gen).cuda()])
        q.normal_()
        out.fill_(torch.nan)
        graph.replay()
        assert relative_error(out, store, 1, q, rows, lens, scale=0.1, **options) < BAR


@ENGINES
def test_queries_that_are_a_view(engine):
    store, q, rows, lens = case = make_case("k4v4", head_dim=128, lens=(150, 64), device="cuda")
    op = build(case, engine)
    op.plan(rows, lens)
    wide = torch.randn((len(q), q.shape[1] + 4, q.shape[2]), device="cuda").to(q.dtype)
    view = wide[:, 2:-2]
    assert relative_error(op.run(0, view, scale=0.1), store, 0, view, rows, lens, scale=0.1) < BAR
