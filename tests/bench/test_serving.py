"""The end-to-end benchmark: which servers run, which stock server counts, and how calls and runs are merged."""

import json
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from bench.common import demo_model
from bench.e2e import arms, long_answers, rates, serving
from bench.e2e.passages import write_passages


def arguments(*argv):
    return serving.arguments(["--model", "x", "--stock-backends", "fa3", *argv])


def test_servers_follow_options():
    assert list(serving.servers(arguments("--quick"))) == ["bf16", "fp8_e4m3", "kvc_k4v4"]
    servers = serving.servers(arguments("--stock-backends", "fa3,fa3:128,flashinfer"))
    assert [n for n in servers if n.startswith("bf16")] == [
        "bf16", "bf16_fa3_p128", "bf16_flashinfer", "bf16_free", "bf16_free_fa3_p128", "bf16_free_flashinfer",
    ]  # fmt: skip
    described = {n: arms.describe(options) for n, (options, _) in servers.items()}
    assert described["fp8_e4m3_fa3_p128"] == "stock fp8_e4m3, fa3, pages of 128 tokens"
    assert described["bf16"] == "stock bf16, fa3" and described["bf16_free_flashinfer"] == "stock bf16, flashinfer"
    assert servers["bf16"][1] == [64, 1, 8] and servers["bf16_free"][1] == [64] and servers["kvc_k4v4"][1] == [64, 1, 8]
    off = serving.servers(arguments("--quick", "--no-prefill-graphs")).values()
    assert all("--cuda-graph-backend-prefill=disabled" in options for options, _ in off)
    also = arguments("--quick", "--only", "kvc_two", "--also", "two: --kvc-policy leankv")
    options, loads = serving.servers(also)["kvc_two"]
    assert options[options.index("--kvc-policy") + 1] == "leankv" and loads == [64]


def run(*speeds, ttft=1000.0, options="--attention-backend fa3", running=64):
    runs = [
        {"output_tok_s": s, "ttft_ms_median": ttft, "running_median": running, "running_most": running} for s in speeds
    ]
    return {"options": options.split(), **serving.summary(runs)}


def test_scores_take_fastest_stock_server():
    args = arguments("--quick")
    fp8 = "--kv-cache-dtype fp8_e4m3 --attention-backend fa3"
    numbers = {"bf16.c64": run(900.0), "bf16_flashinfer.c64": run(1000.0, options="--attention-backend flashinfer")}
    numbers |= {"fp8_e4m3.c64": run(1500.0, ttft=500.0, options=fp8)}
    numbers |= {"fp8_e4m3_fa3_p128.c64": run(1400.0, ttft=400.0, options=f"{fp8} --page-size 128")}
    numbers |= {"kvc_k4v4.c64": run(2400.0, ttft=300.0)}
    scores = serving.scores(numbers, args)
    assert scores["e2e.vs_bf16"].value == 2.4 and scores["e2e.vs_bf16"].baseline == "stock bf16, flashinfer"
    assert scores["e2e.vs_fp8"].value == 1.6 and scores["e2e.vs_fp8"].baseline == "stock fp8_e4m3, fa3"
    ttft = scores["e2e.ttft_vs_fp8"]  # against the stock server with the fastest first token
    assert ttft.value == 0.75 and ttft.baseline == "stock fp8_e4m3, fa3, pages of 128 tokens"
    assert serving.scores(numbers, arguments("--quick", "--no-prefill-graphs")) == {}
    assert serving.scores(numbers, arguments("--quick", "--tokens", "9")) == {}
    assert len(serving.table(numbers).splitlines()) == 6


def test_long_answers_and_rates_take_fastest_stock_server():
    numbers = {"bf16.c64": run(900.0), "bf16_fa3_p128.c64": run(1000.0), "fp8_e4m3.c64": run(5000.0)}
    numbers |= {"kvc_k4v4.c64": run(2500.0), "kvc_kv-compress-8x.c64": run(3000.0)}
    scores = long_answers.scores(numbers, arguments("--quick"))
    assert {n: s.value for n, s in scores.items()} == {
        "papers.longgen.vs_bf16.k4v4": 2.5, "papers.longgen.vs_bf16.kv-compress-8x": 3.0,
        "papers.longgen.vs_fp8.k4v4": 0.5, "papers.longgen.vs_fp8.kv-compress-8x": 0.6,
    }  # fmt: skip
    trained = long_answers.scores(numbers, arguments("--quick", "--text", "essays.txt"))
    assert trained["papers.longgen_text.vs_bf16.k4v4"].value == 2.5 and not set(trained) & set(scores)
    assert long_answers.scores({"kvc_k4v4.c64": run(1.0)}, arguments("--quick")) == {}
    swept = {"bf16.rate1": run(900.0), "bf16_fa3_p128.rate1": run(1000.0), "kvc.rate8": run(4000.0)}
    assert {n: s.value for n, s in rates.scores(swept).items()} == {"papers.rate8": 4.0}


def test_passages_are_cut_from_text(tmp_path):
    words = " ".join(f"word{i}" for i in range(2000))
    (tmp_path / "text").write_text(words)
    first, second = (tmp_path / name for name in ("first", "second"))
    for file, seed in ((first, 1), (second, 2)):
        write_passages(file, tmp_path / "text", str(demo_model()), 5, 40, seed)
    rows = [json.loads(line)["conversations"] for line in first.read_text().splitlines()]
    passages = [turns[0]["content"] for turns in rows]
    tokenizer = AutoTokenizer.from_pretrained(demo_model())
    assert len(set(passages)) == 5 and all(len(turns) == 2 for turns in rows)
    assert all(p in words and abs(len(tokenizer.encode(p)) - 40) <= 2 for p in passages)
    assert second.read_text() != first.read_text()
    with pytest.raises(ValueError, match="a prompt needs 99999"):
        write_passages(first, tmp_path / "text", str(demo_model()), 1, 99999, 0)


def test_concurrent_decodes_are_counted(tmp_path):
    log = tmp_path / "log"
    log.write_text("Decode batch, #running-req: 99, x\n" + "".join(
        f"Decode batch, #running-req: {n}, #token: 5\n" for n in (3, 7, 5)
    ))  # fmt: skip
    assert serving.running(log, 34) == {"running_median": 5, "running_most": 7}


def test_scores_with_spare_memory_take_unconstrained_stock():
    numbers = {f"{n}.c{c}": run(v * c) for n, v in (("bf16", 10.0), ("kvc_k4v4", 11.0)) for c in (1, 8)}
    numbers |= {"kvc_k4v4.c64": run(2400.0), "bf16_free.c64": run(1600.0), "bf16.c64": run(1.0)}
    scores = serving.scores(numbers, arguments())
    assert [scores[f"e2e.unconstrained_vs_bf16_c{c}"].value for c in (1, 8, 64)] == [1.1, 1.1, 1.5]
    worst = scores["e2e.unconstrained_vs_bf16"]
    assert worst.value == 1.1 and worst.unit == "x output tok/s, worst of 3 concurrencies"
    numbers["bf16_free.c64"] = run(1600.0, running=62)  # its memory did not hold all requests
    scores = serving.scores(numbers, arguments())
    assert "e2e.unconstrained_vs_bf16_c64" not in scores and scores["e2e.unconstrained_vs_bf16"].value == 1.1
    assert serving.scores(numbers, arguments("--text", "essays.txt")) == {}


def test_repeated_runs_have_a_spread():
    numbers = {"bf16.c64": run(100.0, 110.0, 90.0), "kvc_k4v4.c64": run(200.0, 260.0, 220.0)}
    score = serving.scores(numbers, arguments("--quick"))["e2e.vs_bf16"]
    assert score.value == pytest.approx(2.2) and score.n == 3
    assert (score.low, score.high) == (pytest.approx(200 / 110), pytest.approx(260 / 90))


def test_call_resumes_interrupted_one(monkeypatch, tmp_path):
    loads = []
    monkeypatch.setattr(serving, "load", lambda server, args, c, *_, seed=0: loads.append((c, seed)) or {
        "output_tok_s": 1.0 + len(loads), "ttft_ms_median": 1.0
    })  # fmt: skip
    monkeypatch.setattr(serving, "RESULTS", tmp_path)
    monkeypatch.setattr(serving, "measured_commit", lambda: "abc")
    monkeypatch.setattr(serving, "device_name", lambda: "GPU")
    server = SimpleNamespace(seconds_to_start=1.0, errors=list)
    server.client = SimpleNamespace(flush=lambda: None, stats=dict)
    args, numbers = arguments("--append", "--name", "run", "--repeat", "2"), {}
    args.score = lambda *_: {}

    def written(name, rows, **_):
        (tmp_path / "run.json").write_text(json.dumps(dict(commit="abc", device="GPU", numbers=rows)))

    monkeypatch.setattr(serving, "write_result", written)
    assert serving.earlier_rows(args) == {} and serving.missing({}, args, "bf16", [64, 1]) == [64, 1]
    serving.measure(server, args, "bf16", [], [64, 1], numbers)
    assert loads[1:] == [(64, 0), (64, 1000), (1, 0), (1, 1000)] and serving.earlier_rows(args) == numbers
    assert numbers["bf16.c64"]["output_tok_s"] == 3.5 and len(numbers["bf16.c64"]["runs"]) == 2
    args.repeat = 3
    assert serving.missing(numbers, args, "bf16", [64, 1, 8]) == [64, 1, 8]
    serving.measure(server, args, "bf16", [], [64], numbers)
    assert loads[-1] == (64, 2000) and serving.missing(numbers, args, "bf16", [64]) == []
    # Results that another call added in the meantime are kept.
    serving.save({"kvc_k4v4.c64": {"runs": []}}, args)
    assert set(serving.earlier_rows(args)) == {"bf16.c64", "bf16.c1", "kvc_k4v4.c64"}
    (tmp_path / "run.json").write_text(json.dumps(dict(commit="def", device="GPU", numbers=numbers)))
    with pytest.raises(SystemExit, match="commit def"):
        serving.earlier_rows(args)


def test_profile_is_not_scored_as_run():
    runs = {"bf16.c64": {"output_tok_s": 1.0}, "bf16": {"profile": {"kernels": []}}}
    assert len(serving.table(runs).splitlines()) == 2
    assert serving.scores(runs, arguments()) == {}
