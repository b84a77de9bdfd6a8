"""The scoreboard: which row counts, how a row describes its measurement, and what pages show."""

import json
import subprocess

import pytest

from bench import scoreboard, tables
from bench.common import RESULTS, ROOT, Score
from bench.quality import cells, intervals
from bench.tables.text import SGLANG_0_5_17, points_lost, sha, worded


def write(folder, name, device, day=1, numbers=None, **scores):
    path = folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"command": "c", "commit": f"{day}abcdef0123", "device": device, "date": f"2026-01-0{day}"}
    scores = {k.replace("__", "."): Score(*v).to_dict() for k, v in scores.items()}
    path.write_text(json.dumps(record | {"scores": scores, "numbers": numbers or {}}))


def test_scores_come_from_commits_of_this_repository():
    if not (ROOT / ".git").exists():
        pytest.skip("needs the repository's history")
    for commit in {row["commit"] for row in json.loads(scoreboard.OUT.read_text()).values()}:
        result = subprocess.run(["git", "merge-base", "--is-ancestor", commit, "HEAD"], cwd=ROOT, capture_output=True)
        assert result.returncode == 0, f"{commit} is no ancestor of HEAD"


def test_score_names_include_device(tmp_path):
    for day, (device, value) in enumerate({"NVIDIA H100 80GB HBM3": 2.0, "NVIDIA H200": 1.0, "CPU, 2": 9.0}.items(), 1):
        write(tmp_path, str(day), device, day, decode__x=(value, "x"), serve__x=(value, "x"))
    values = {name: row["value"] for name, row in scoreboard.collect(tmp_path).items()}
    assert values["decode.x"] == 1.0 and values["decode.x_h100"] == 2.0 and values["decode.x_cpu"] == 9.0
    assert values["serve.x"] == 9.0 and "serve.x_h100" not in values  # correctness: the latest counts, wherever it ran


def test_rows_name_their_conditions(tmp_path):
    rows = {"bf16.c1": {"options": [], "command": "one"}, "kvc.c1": {"options": [], "command": "two"}}
    rows["reference"] = {"command": "that of another file"}
    write(tmp_path, "e2e/a", "NVIDIA H200", numbers=rows, e2e__vs_bf16=(1.5, "x", "stock bf16, fa3", 3, 1.4, 1.6))
    write(tmp_path, "b", "NVIDIA H200", decode__x=(0.5, "x"))
    board = scoreboard.collect(tmp_path)
    row = board["e2e.vs_bf16"]
    assert row["commands"] == ["one", "two"] and row["file"] == "e2e/a.json" and row["baseline"] == "stock bf16, fa3"
    assert (row["n"], row["low"], row["high"]) == (3, 1.4, 1.6) and board["decode.x"]["n"] == 1
    text = tables.tables(board, tmp_path)
    assert "| 1.50x (1.40x to 1.60x) |  | stock bf16, fa3 | 3 | 1abcdef |" in text
    text = tables.commands(board)
    assert "  one\n  two\n" in text and "[b.json](../bench/results/b.json), NVIDIA H200, 1abcdef: `decode.x`." in text


def test_commits_of_another_sglang_release_are_named():
    if not (ROOT / ".git").exists():
        pytest.skip("needs the repository's history")
    assert sha("cc5136d0123") == "cc5136d (SGLang 0.5.17)" and sha("e92c6a50123") == "e92c6a5"
    records = [json.loads(path.read_text()) for path in RESULTS.rglob("*.json") if path != scoreboard.OUT]
    commits = {r["commit"][:7] for r in records if isinstance(r, dict) and "commit" in r}
    for commit in commits:
        show = subprocess.run(["git", "show", f"{commit}:pyproject.toml"], cwd=ROOT, capture_output=True, text=True)
        if show.returncode == 0:
            assert (commit in SGLANG_0_5_17) == ("sglang==0.5.17" in show.stdout), commit


def test_checks_of_the_project_itself_have_no_row(tmp_path):
    write(tmp_path, "a", "CPU, 2", current__sglang=(5.23, "SGLang's release 0.x as x"), serve__x=(1.0, "x"))
    board = scoreboard.collect(tmp_path)
    text = tables.tables(board, tmp_path)
    assert "current.sglang" in board and "5.23" not in text and "| `serve.x` | 1.000x |" in text


def test_units_are_words(tmp_path):
    retried = (0.0283, "of the tokens prefilled again by 64 sessions")
    write(tmp_path, "a", "CPU, 2", papers__retraction_recompute=retried)
    beside = (1.06, "of the time alone, beside a load of 1.19 of a plain copy")
    hit = (0.994, "of an endless cache's hit rate", "64 agents (same command at 35333b4 on another host)")
    most = (8.0, "x agents, p90 within 2 s to the first token and 25 ms per token, at least")
    scores = {
        "agents__vs_bf16": most,
        "agents__demoted_ttft_ratio": (0.9445, "of the time before"),
        "agents__hit_of_endless_2x": hit,
    }
    write(tmp_path, "b", "NVIDIA H200", agents__attention_beside_swap=beside, **scores)
    text = tables.tables(scoreboard.collect(tmp_path), tmp_path)
    assert "after retractions, with host memory | 2.8% |" in text and "| 0.94x, within noise |" in text
    assert "| 1.06x, beside a load that takes 1.19x as long as a plain copy |" in text
    assert "| at least 8.00x |" in text
    assert "| 99.4% |  | 64 agents | 1 |" in text


def test_names_in_result_files_are_worded():
    assert worded("stock fp8_e4m3: fa3_page128") == "stock fp8: fa3, pages of 128 tokens"
    assert worded("bf16, fa3 page 1") == "bf16, fa3, pages of 1 token"
    assert worded("stock_fp8_hicache, 56 agents") == "stock fp8 with `hicache`, 56 agents"
    assert worded("the hit rate of kvc drops") == "the hit rate of `k4v4` drops"


def test_every_plot_is_on_a_page():
    pages = "".join(page.read_text() for page in scoreboard.PAGES)
    plots = [path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*.png")]
    assert plots and not [plot for plot in plots if f"bench/results/{plot})" not in pages]


def test_gpus_are_shown_side_by_side(tmp_path):
    write(tmp_path, "a", "NVIDIA H200", 1, e2e__vs_fp8=(1.5, "x", "stock, fa3"), decode__vs_fp8__k4v4=(2.0, "x"))
    write(tmp_path, "b", "NVIDIA H100", 2, e2e__vs_fp8=(1.7, "x", "stock, fa3"), decode__vs_fp8__k4v4=(3.0, "x"))
    text = tables.tables(scoreboard.collect(tmp_path), tmp_path)
    assert "vs. stock fp8, same load and memory | 1.50x | 1.70x | stock, fa3 | 1 | 1abcdef; 2abcdef |" in text
    assert "| k4v4 | 2.00x | 3.00x |" in text


def test_agents_are_shown_as_a_curve(tmp_path):
    step = dict(from_cache=0.5, steps_s=3.94, step_s_mean=1.0, step_s_median=0.9, step_s_p99=4.0)
    numbers = {f"{s}.a{n}": step | {"options": []} for s, n in (("bf16", 16), ("bf16", 64), ("kvc_k4v4", 64))}
    shares = {"results": 0.8, "filler": 0.0}
    numbers["sessions"] = {"shares": shares, "tokens_mean": 9e3, "tokens_longest": 3e4, "pause": 2.0, "seconds": 40.0}
    write(tmp_path, "e2e/agents_h200", "NVIDIA H200", numbers=numbers, **{"agents__curve__bf16__16": (0.5, "share")})
    (tmp_path / "e2e" / "agents_h200.png").touch()
    text = tables.tables(scoreboard.collect(tmp_path), tmp_path)
    assert text.count("![") == 1 and "H200](../bench/results/e2e/agents_h200.png)" in text
    assert "| server | 16 agents | 64 agents |" in text and "80% of these tokens are outputs" in text
    assert "| kvc, k4v4 |  | 50%; 3.9; 1 / 0.9 / 4 |" in text and "agents.curve.bf16.16" not in text


def test_replayed_agents_have_a_table_for_each_workload(tmp_path):
    row = {"from_cache": 0.5, "first_token_s_p50": 0.1, "first_token_s_p90": 0.2, "output_token_s_p90": 0.02}
    row |= {"first_token_s_p99": 150.0, "output_token_s_p99": 0.05, "answers_h": 900, "sessions_h": 30}
    row |= {"computed_again": 0.25, "ramp_s": 2, "measured_s": 8}
    row |= {"tiers": {"host_saved_bytes": [0, 30 * 10**9], "host_loaded_bytes": [10**9, 6 * 10**9]}}
    common = {"tokens": 105000, "host_gb": 32, "seconds": 60.0, "time_scale": 0.5, "length_scale": 0.25, "endless": 0.9}
    other = row | {"source": "same command with --ramp 240 at 7f2b2ac on another host", "tiers": {}}
    third = row | {"source": "printed line of the same command at f376484 on another H200", "tiers_s": 5}
    other["output_token_s_p90"] = 0.026
    third |= {"job_s_p50": 40.4, "job_s_p90": 61.6, "job_share_paused": 0.75}
    numbers = {"kvc_tiers.a8": row, "kvc.a8": other, "kvc.a16": third, "settings": common}
    numbers |= {"most_agents": {"kvc_tiers": 8, "kvc": 0}}
    write(tmp_path, "e2e/agent_replay_h200", "NVIDIA H200", numbers=numbers)
    dialogues = common | {"workload": "bfcl", "join": 2, "think": 64, "tool_seconds": 8.0, "length_scale": 1.0}
    write(tmp_path, "e2e/agent_replay_bfcl_h200", "NVIDIA H200", numbers=numbers | {"settings": dialogues})
    (tmp_path / "e2e" / "agent_replay_bfcl_h200.png").touch()
    text = tables.tables({}, tmp_path)
    assert "Sessions have 25% of the recorded lengths and 50% of the recorded pauses." in text
    assert "A session has 2 of BFCL's dialogues" in text and "A function takes 4 s on average." in text
    assert text.count("Agents run in a closed loop") == 1 and text.count("![") == 1
    assert text.count("| `k4v4`, host memory | at least 8 |\n") == 2  # no point missed
    assert text.count("| `k4v4` | fewer than 8 |") == 2  # the first point missed
    assert "| again | answers/h | sessions/h | session p50 / p90, s; paused | host, GB/s |\n" in text
    times, figures = "50% | 0.1 / 0.2 / 150", "25.0% | 900 | 30"
    # Bytes are averaged over the ramp-up, too, without `tiers_s`.
    assert text.count(f"| `k4v4`, host memory | 8 | yes | {times} | 20 / 50 | {figures} |  | 3.0 / 0.5 |") == 2
    assert text.count(f"| `k4v4` | 8 \\*\\* | no | {times} | 26 / 50 | {figures} |  |  |") == 2
    assert text.count(f"| `k4v4` | 16 \\* | yes | {times} | 20 / 50 | {figures} | 40 / 62; 75% | 6.0 / 1.0 |") == 2
    printed = "another run at f376484, printed figures without a result file"
    assert text.count(f" \\*: {printed}. \\*\\*: another run at 7f2b2ac, with --ramp 240.</sub>") == 2


def test_pages_show_scores_in_text(tmp_path, monkeypatch):
    write(tmp_path, "a", "CPU, 2", numbers={"a/b": [{"speed": 1234.4}]}, serve__x=(0.25, "share of tokens"))
    board = scoreboard.collect(tmp_path)
    monkeypatch.setattr(scoreboard, "RESULTS", tmp_path)
    page = "so <!--= serve.x -->old<!--/--> and <!--= a numbers/a~1b/0/speed .0f --><!--/-->."
    shown = scoreboard.render(page, board)
    assert shown == "so <!--= serve.x -->25.0%<!--/--> and <!--= a numbers/a~1b/0/speed .0f -->1234<!--/-->."
    assert scoreboard.render(shown, board) == shown
    with pytest.raises(SystemExit, match=r"shows serve\.y, which no result file has"):
        scoreboard.render("<!--= serve.y --><!--/-->", board)


def run(questions, first, lost, device="NVIDIA H200"):
    marks = {"em": (questions - lost) / questions, "of": questions, "right_to_wrong": lost, "wrong_to_right": 0}
    rows = {"stock": {"kv": {"em": 1.0, "of": questions}}, "max": {"kv": marks}}
    numbers = {"model": "qwen-0.5b", "length": 2048, "contexts": questions // 8, "cells": rows, "first": first}
    numbers["raw"] = {name: {} for name in rows}
    return {"command": "c", "commit": "0", "device": device, "date": "2026-01-01", "numbers": numbers}


def test_preset_is_scored_on_held_out_questions(tmp_path):
    (tmp_path / "quality").mkdir()
    (tmp_path / "quality" / "policies_a.json").write_text(json.dumps(run(104, 0, 4)))
    row = scoreboard.collect(tmp_path)["quality.max.qwen-0.5b.kv.delta"]
    assert row["value"] == pytest.approx(-100 * 4 / 104) and "chosen" in row["unit"]
    assert points_lost(row).startswith("-3.8\\* [-9.")
    (tmp_path / "quality" / "policies_b.json").write_text(json.dumps(run(104, 1000, 9)))
    row = scoreboard.collect(tmp_path)["quality.max.qwen-0.5b.kv.delta"]
    assert row["value"] == pytest.approx(-100 * 9 / 104) and "chosen" not in row["unit"]


def test_pruned_share_is_that_of_the_calibrated_thresholds(tmp_path):
    marks = {"em": 1.0, "of": 104, "right_to_wrong": 0, "wrong_to_right": 0}
    record = run(104, 0, 0)
    for cell, kept in (("leankv+alpha_low=0.04", 0.98), ("leankv+alpha_low=0.1", 0.95)):
        record["numbers"]["cells"][cell] = {"kept": kept, "kv": marks}
        record["numbers"]["raw"][cell] = {}
    record["scores"] = {"papers.leankv.pruned_share.qwen-0.5b": {"value": 0.05, "unit": "share"}}
    (tmp_path / "quality").mkdir()
    (tmp_path / "quality" / "policies_a.json").write_text(json.dumps(record))
    assert "papers.leankv.pruned_share.qwen-0.5b" not in scoreboard.collect(tmp_path)
    thresholds = {"alpha_high": 1.0, "alpha_low": 0.04, "high": "k8v4", "low": "k4v2"}
    write(tmp_path, "calibrate_answers/a", "CPU", numbers={"model": "qwen-0.5b", "thresholds": thresholds})
    row = scoreboard.collect(tmp_path)["papers.leankv.pruned_share.qwen-0.5b"]
    assert row["value"] == pytest.approx(0.02) and row["file"] == "quality/policies_a.json"


def test_calibration_score_compares_formats_with_same_key_mode(tmp_path):
    kl = {("k4v4", "channel"): 0.004, ("k4v2", "channel"): 0.01, ("k4v4", "token"): 2.0, ("k4v2", "token"): 2.0}
    formats = [{"format": name, "key_mode": mode, "kl_mean": x} for (name, mode), x in kl.items()]
    numbers = {"model": "qwen-0.5b", "settings": {"scored": 960}, "formats": formats}
    write(tmp_path, "calibrate/any", "CPU, 2", numbers=numbers)
    row = scoreboard.collect(tmp_path)["quality.k4v2_over_k4v4_kl.qwen-0.5b"]
    assert row["value"] == pytest.approx(2.5) and "960 tokens" in row["unit"] and row["file"] == "calibrate/any.json"


def test_row_at_floor_is_marked():
    marks = {"em": 2 / 104, "of": 104, "right_to_wrong": 1, "wrong_to_right": 1}
    score = cells.delta(marks)
    assert score.unit.endswith("floor: stock has 2 right") and points_lost(score.to_dict()) == "floor"


@pytest.mark.parametrize(("won", "lost"), [(0, 0), (5, 1), (0, 30), (104, 0)])
def test_intervals_contain_measured_difference(won, lost):
    low, high = intervals.paired(won, lost, 104)
    assert -1 <= low <= (won - lost) / 104 <= high <= 1 and high - low > 0.03
    assert intervals.paired(lost, won, 104) == (pytest.approx(-high), pytest.approx(-low))


def test_intervals_agree_with_tango():
    """If nothing changed, the interval has the closed form z^2 / (n + z^2)."""
    z2 = intervals.Z**2
    assert intervals.paired(0, 0, 104)[1] == pytest.approx(z2 / (104 + z2), abs=1e-6)


def test_rates_of_one_shot_prompts_have_table(tmp_path):
    def row(running: int, speed: float) -> dict:
        speeds = {"running_most": running, "output_tok_s": speed, "ttft_ms_median": 1500.0, "itl_ms_median": 7.5}
        return {"options": ["--attention-backend", "fa3"], **speeds}

    numbers = {"bf16.rate1": row(6, 500.0), "kvc.rate1": row(18, 1000.0), "kvc.rate64": row(64, 2000.0)}
    write(tmp_path, "e2e/rates_h100", "NVIDIA H100 80GB HBM3", numbers=numbers, papers__rate64=(4.0, "x output tok/s"))
    text = tables.tables(scoreboard.collect(tmp_path), tmp_path)
    assert "|  | stock bf16 | 1x | 64x |" in text and "| vs. stock bf16 | 1.00x | 2.00x | 4.00x |" in text
    assert "| running requests, most | 6 | 18 | 64 |" in text and "## Speed" not in text


def test_long_answers_show_running_batch(tmp_path):
    def row(median: float, most: int, speed: float, **more) -> dict:
        options = ["--kv-backend", "default", "--attention-backend", "fa3"]
        return {"options": options, "running_median": median, "running_most": most, "output_tok_s": speed} | more

    other = row(32, 50, 750.0, source="1111111 on another host")
    numbers = {"bf16.c64": row(19.0, 25, 500.0), "fp8_e4m3.c64": other, "kvc_k4v4.c64": row(60.5, 64, 1000.0)}
    score = {"papers__longgen__vs_bf16__k4v4": (2.0, "x"), "papers__longgen__vs_fp8__k4v4": (1.5, "x")}
    write(tmp_path, "e2e/long_answers_h100", "NVIDIA H100 80GB HBM3", numbers=numbers, **score)
    text = tables.tables(scoreboard.collect(tmp_path), tmp_path)
    assert "| stock bf16, fa3 | 500 |  |  | 19 | 25 | H100 at 1abcdef |" in text
    assert "| 750 |  |  | 32 | 50 | H100 at 1111111, another host |" in text
    assert "| `k4v4` | 1000 | 2.00x | 1.50x | 60 | 64 | H100 at 1abcdef |" in text and "## Speed" not in text


def test_longest_prompts_of_equal_settings_share_a_column(tmp_path):
    def cells(**tokens: int) -> dict:
        return {"memory": "16MiB", "chunk": 256, "cells": {name: {"tokens": n} for name, n in tokens.items()}}

    write(tmp_path, "serve/longest", "CPU", 1, cells(stock=1000, k4v4=3000), papers__longest__k4v4=(3.0, "x"))
    write(tmp_path, "serve/longest_policies", "CPU", 2, cells(stock=1000, leankv=800))
    write(tmp_path, "serve/longest_1gb", "NVIDIA H200", 3, cells(stock=5000, k4v4=20000))
    text = tables.tables(scoreboard.collect(tmp_path), tmp_path)
    assert "16MiB, chunks of 256 tokens, CPU | Qwen2.5-Coder-1.5B in 16MiB, chunks of 256 tokens, H200 |" in text
    assert "| `balanced` (k4v4) | 3,000, 3.00x (1abcdef) | 20,000, 4.00x (3abcdef) |" in text
    assert "| `leankv` | 800, 0.80x (2abcdef) |  |" in text and "stock fp8 |" not in text and "## Speed" not in text


def test_one_shot_prompts_and_long_contexts_have_separate_tables():
    source = {"device": "NVIDIA H200", "commit": "abcdef0123", "date": "2026", "file": "f.json", "commands": ["c"]}
    points = {"unit": "points of 104 questions", "baseline": "", "n": 1, "low": -4.0, "high": 1.0, **source}
    board = {f"papers.oneshot.{r}x.qwen-0.5b.kv.delta": points | {"value": -float(r)} for r in (16, 8)}
    board["quality.32k.balanced.qwen-1.5b.niah.delta"] = points | {"value": -1.9}
    board["quality.32k.balanced.qwen-1.5b.kl_p99"] = points | {"value": 0.03, "unit": "nats a token"}
    text = tables.tables(board)
    assert "| model | task | 8x | 16x | measured |" in text
    assert "| Qwen2.5-Coder-0.5B | dictionary | -8.0 [-4.0, +1.0] | -16.0 [-4.0, +1.0] | H200, abcdef0 |" in text
    assert "| model | preset | 8 needles | KL p99 | measured |" in text
    assert "| Qwen2.5-Coder-1.5B | `balanced` (k4v4) | -1.9 [-4.0, +1.0] | 0.03 | H200, abcdef0 |" in text
    assert "`papers.oneshot" not in text
