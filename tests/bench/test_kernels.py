"""The benchmarks that need a GPU: they import, define their workloads, and turn timings into tables and scores."""

import json
from pathlib import Path

import pytest
import torch

from bench.kernels import common, compaction, decode, extend, sectors

ROOT = Path(__file__).parents[2]


def fake_decode(suite):
    """Rows as a run writes them: our kernels take 1 ms more for each further format, stock kernels 10 ms and more."""
    args = decode.arguments([suite])
    points = decode.SUITES[suite](args)
    rows = [dict(case="check", ladder="k4v4", group=4, error=1e-3)]
    for batch, tokens in dict.fromkeys((w.batch, w.tokens) for _, w in points):
        for i, kv in enumerate(("bf16", "fp8_e4m3")):
            for name, ms in (("flashinfer_page1_tc", 12.0), ("flashinfer_page16_tc", 10.0 - i)):
                rows.append(dict(case="stock", name=name, kv=kv, batch=batch, tokens=tokens, head_dim=128, ms=ms))
    for i, (name, w) in enumerate(points):
        size = 1000 * (i + 1)
        rows.append(
            dict(case="ours", name=name, batch=w.batch, tokens=w.tokens, ms=1.0 + i, bytes=size, of_copy=0.9, nan=False)
        )
    return rows


def test_decode_scores_take_worst_shape(tmp_path, capsys):
    rows = fake_decode("targets")
    scores = decode.scores("targets", rows)
    formats = ("k8v8", "k8v4", "k4v4", "k4v2", "k4v4_half", "mix", "mix_256")
    assert set(scores) == {f"decode.vs_{kv}.{f}" for kv in ("bf16", "fp8") for f in formats} | {
        "decode.bandwidth.k8v4"
    }
    assert scores["decode.vs_bf16.k8v8"][0] == pytest.approx(10 / 8)  # from the second shape, which is the worse one
    assert scores["decode.vs_fp8.k8v8"][0] == pytest.approx(9 / 8)
    assert scores["decode.vs_fp8.k8v8"].baseline == "stock fp8_e4m3: flashinfer_page16_tc"
    results = common.Results(tmp_path / "deep" / "decode.json", copy_bytes_per_s=1e12)
    for row in rows:
        results.add(row)
    assert len(json.loads(results.path.read_text())["rows"]) == len(rows)
    results.score(scores)
    results.show()
    assert "decode.bandwidth.k8v4" in capsys.readouterr().out
    lines = decode.ratios_of(rows)
    text = common.table(lines, decode.COLUMNS).splitlines()
    assert len(text) == 1 + len(lines) and len({len(x) for x in text}) == 1


def test_decode_grid_and_uneven_lengths():
    points = decode.grid(decode.arguments(["grid"]))
    assert {(w.batch, w.tokens) for _, w in points} >= {(1, 1024), (256, 1024), (1, 131072)}
    assert set(decode.scores("grid", fake_decode("grid"))) == {"decode.worst_vs_bf16"}
    lines = decode.ratios_of(fake_decode("uneven"))
    assert all("per_byte" in x for x in lines)
    assert {"one 64K of 64", "heads 10..90 %", "group 6", "group 7", "group 8", "head_dim 64"} <= {
        x["name"] for x in lines
    }


@pytest.mark.parametrize("suite", decode.SUITES)
def test_every_workload_has_a_layout_and_counts(suite):
    for _, w in decode.SUITES[suite](decode.arguments([suite])):
        assert all(w.layout().page(f).tokens >= 16 for f in w.formats)
        counts = w.counts(3, torch.Generator().manual_seed(0))
        assert counts.shape == (3, w.layers, w.heads, 2) and int(counts.sum(-1).max()) <= w.block_tokens


def test_extend_scores():
    def row(name, new, ms, vs, ours):
        return dict(case="prefix", prefix=9, new=new, name=name, ms=ms, vs_stock=vs, tflops=1.0, ours=ours)

    rows = [dict(case="check", name="hopper", worst_row_error=0.004)]
    for new in (1, 64, 1024):
        rows += [row("fa3 page 128", new, 2.5, 1.25, False), row("flashinfer fa2 page 1", new, 2.0, 1.0, False)]
        rows += [row("hopper", new, 1.0, 0.5, True)]
        rows += [row("triton 64x4", new, 3.0, 1.5, True)]
    prompt = {"prefill of one layer": 20.0, "window 64": 0.1, "all": 5.0, "one in 16": 1.0}
    for case, vs in zip(extend.BATCHES, (0.7, 0.9, 0.8)):
        rows += [row(n, 64, 1.0, x, True) | dict(case=case) for n, x in (("hopper", vs), ("triton 64x4", 2.0))]
    steps = {"attention": 0.1, "one layer": 0.4, "one step in 1": 0.2, "one step in 32": 0.01}
    for case, times in (("score", prompt), ("score decode", steps)):
        rows += [{"case": case, "name": n, "ms": ms} for n, ms in times.items()]
    scores = extend.scores(rows)
    assert {n: score[0] for n, score in scores.items()} == pytest.approx({
        "extend.vs_stock.1": 0.5, "extend.vs_stock.64": 0.5, "extend.vs_stock.1k": 0.5, "extend.vs_stock.batch": 0.9,
        "score.prefill_overhead": 0.005,
        "score.prefill_overhead_all": 0.25, "score.prefill_overhead_sampled": 0.05, "score.decode_overhead": 0.025,
    })  # fmt: skip
    assert scores["extend.vs_stock.64"][2] == "bf16, flashinfer fa2 page 1"
    assert len(common.table(rows, extend.COLUMNS).splitlines()) == 1 + len(rows)
    assert extend.scores(rows[:1]) == {}


def test_compaction_scores():
    rows = [dict(case="model", name="prefill", ms=400.0), dict(case="model", name="decode step", ms=10.0)]
    for blocks, ms in ((128, 4.0), (8, 1.0), (1, 0.5)):
        rows.append(dict(case="compact", format="k4v4", blocks=blocks, block_tokens=128, ms=ms, launch_ms=0.8))
    scores = compaction.scores(rows, batch=64)
    assert scores["compaction.prefill_overhead"][0] == 0.01
    assert scores["compaction.decode_overhead"][0] == pytest.approx(0.5 / 2 / 10)
    assert scores["compaction.decode_overhead_exposed"][0] == pytest.approx(0.8 / 2 / 10)
    assert "compaction.leankv_decode_overhead" not in scores
    tiers = dict(rows[-1], format="k8v4+k4v2", ms=0.2, plan_ms=0.1, plan_again_ms=0.3, again_ms=0.4)
    overhead = compaction.scores([*rows, tiers], batch=64)["compaction.leankv_decode_overhead"]
    assert overhead[0] == pytest.approx(1.0 / 2 / 10)
    assert len(common.table(rows, compaction.COLUMNS).splitlines()) == 1 + len(rows)
    assert compaction.scores(rows[:2], 64) == {}


def test_part_filled_pages_count_whole_sectors():
    """A full page costs its bytes; a single token costs its key row and one sector of every value and metadata row."""
    k4 = sectors.cases()["k4v4_half"]
    page = k4.layout().page(k4.formats[0])
    token = page.key_row_bytes + page.value_row_bytes + 4 * page.value_groups
    assert page.tokens == 32
    assert sectors.fetched_bytes(k4, 0, 32) == sectors.fetched_bytes(k4, 0, 32, key_rows=False) == 32 * token
    # A value row has one byte of each of the 32 tokens, which is one sector.
    assert sectors.fetched_bytes(k4, 0, 1) == page.key_row_bytes + 32 * page.value_row_bytes + 2 * 32
    assert sectors.fetched_bytes(k4, 0, 33) == sectors.fetched_bytes(k4, 0, 32) + sectors.fetched_bytes(k4, 0, 1)
