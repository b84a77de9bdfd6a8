"""The replay of agents: its prompts and counts, with a server that only remembers prompts."""

import itertools
import json
import threading
import time
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from bench.agents.options import Options
from bench.agents.traces import Session, Step
from bench.e2e import agent_replay, agent_servers, dialogues
from bench.e2e.agent_replay import (
    Answer,
    AnsweredPrompt,
    Completions,
    Job,
    Replay,
    most_agents,
    prompts,
    scaled,
    scores,
    summary,
)
from bench.e2e.agent_targets import knee
from sglang_kvc.options.request_hints import DONE, STEPS
from tests.bench.test_agents import DATA, Letters, text


def session(name, tools=3):
    return Session(name, tools, (Step(10, 0, 4, 0.0), Step(14, 9, 2, 0.01), Step(8, 4, 3, 0.0)))


class Cache:
    """A server that remembers all prompts; each answer takes a millisecond."""

    def __init__(self, fail_after=10**9):
        self.prompts, self.hints, self.fail_after, self.lock = [], [], fail_after, threading.Lock()

    def complete(self, prompt, answer, hints=None):
        time.sleep(0.001)
        with self.lock:
            if len(self.prompts) >= self.fail_after:
                raise ConnectionError("gone")
            hit = max((common_prefix(prompt, old) for old in self.prompts), default=0)
            self.prompts.append(prompt)
            self.hints.append(hints)
        return Answer(0.5, 0.5 + 0.02 * (answer - 1), answer, len(prompt), min(hit, len(prompt) - 1))


def common_prefix(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def test_prompts_share_recorded_prefixes():
    one, again, other = (list(prompts(session(name), "0")) for name in ("a", "a", "b"))
    assert one == again
    assert [len(p) for _, p in one] == [10, 14, 8]
    assert [common_prefix(x[1], y[1]) for x, y in itertools.pairwise(one)] == [9, 4]
    assert common_prefix(one[0][1], other[0][1]) == 3  # sessions share their tools
    assert common_prefix(one[0][1], next(prompts(session("a", tools=2), "0"))[1]) < 2
    assert common_prefix(one[0][1], next(prompts(session("a"), "1"))[1]) == 3  # the same session, replayed later


def test_scaled_session_has_fewer_tokens_and_shorter_pauses():
    half = scaled(session("a"), 0.5, 2.0)
    assert half.steps[1] == Step(7, 4, 1, 0.02) and half.tools == 2


def test_steps_are_counted_after_ramp_up():
    server = Cache()
    replay = Replay(server, [session(str(i)) for i in range(6)], 3)
    row = replay.run(0.5, ramp=5, counters=lambda: {"started": replay.started, "stopped": replay.stop.is_set()})
    assert row["tiers"] == {"started": [3, 3], "stopped": [False, False]} and row["tiers_s"] == row["measured_s"]
    assert sum(s.first for s in replay.answered) == 3 and 10 < row["answers"] <= len(replay.answered) - 3
    assert row["computed_again"] == 0 and 0 < row["from_cache"] < 1
    assert row["first_token_s_p90"] == 0.5 and row["output_token_s_p90"] == pytest.approx(0.02)
    assert row["sessions_h"] == pytest.approx(row["answers_h"] / 3, rel=0.3)
    assert 0.4 < row["measured_s"] < 1.5
    # Steps take at least 1 ms, and the second step waits for 10 ms. An agent may enter its first session later.
    jobs = [s.job for s in replay.answered if s.job]
    assert sum(job.pauses == 0.01 for job in jobs) >= len(jobs) - 3 and {job.pauses for job in jobs} <= {0.0, 0.01}
    assert all(job.seconds > job.pauses + 0.001 for job in jobs)
    assert 0.01 < row["job_s_p50"] <= row["job_s_p90"] and 0.05 < row["job_share_paused"] < 1


def test_recomputed_tokens_are_counted():
    seen = [AnsweredPrompt(Answer(1.0, 2.0, 3, 100, cached), 100, 60, 0.0, False) for cached in (60, 20, 380)]
    row = summary(seen, 10.0)
    assert row["from_cache"] == pytest.approx(180 / 300) and row["computed_again"] == pytest.approx(40 / 300)
    silent = summary([AnsweredPrompt(Answer(1.0, 2.0, 3), 100, 60, 0.0, False, Job(4.0, 1.0))], 10.0)
    assert silent["from_cache"] is silent["computed_again"] is None and silent["sessions_h"] == 360
    assert silent["job_s_p50"] == silent["job_s_p99"] == 4.0 and silent["job_share_paused"] == 0.25
    assert "job_s_p50" not in row


def test_agents_send_hints_of_the_step():
    server, options = Cache(), Options(done=True, steps=True)
    replay = Replay(server, [session("a")], 1, hints=partial(options.hints, scale=0.001))
    replay.run(0.2, ramp=5)
    by_length = {len(prompt): hints for prompt, hints in zip(server.prompts, server.hints)}
    assert by_length == {10: {STEPS: 1}, 14: {STEPS: 0}, 8: {DONE: True}}


def test_failed_agent_ends_run():
    with pytest.raises(ConnectionError, match="gone"):
        Replay(Cache(fail_after=5), [session("a")], 2).run(30, ramp=30)


def test_most_agents_within_targets():
    def row(first, rest=0.02):
        return {"first_token_s_p90": first, "output_token_s_p90": rest}

    numbers = {"a.a8": row(1.0), "a.a16": row(2.5), "a.a32": row(1.0), "b.a8": row(1.0, 0.03), "most_agents": {}}
    assert most_agents(numbers) == {"a": 8, "b": 0}


def test_scores_compare_most_agents():
    def row(first, hit=0.5):
        return {"first_token_s_p90": first, "output_token_s_p90": 0.02, "from_cache": hit}

    numbers = {"stock_bf16.a8": row(1.0), "stock_bf16.a16": row(3.0)}
    numbers |= {"kvc.a16": row(1.0, 0.87), "kvc.a32": row(3.0), "kvc_tiers.a32": row(1.0, 0.9)}
    numbers |= {"stock_fp8_hicache.a8": row(1.0)}  # its limit is not reached
    compared = scores(numbers | {"stock_fp8.a8": row(3.0)}, endless=0.96)
    rates = {k: compared.pop(k).value for k in list(compared) if ".curve." in k}
    assert len(rates) == 7 and rates["agents.curve.kvc.16"] == 0.87
    assert {k: v.value for k, v in compared.items()} == {
        "agents.vs_bf16": 4.0, "agents.tiers_vs_static": 2.0, "agents.hit_of_endless_2x": pytest.approx(0.9 / 0.96)
    }  # fmt: skip
    assert "at least" in compared["agents.vs_bf16"].unit
    elsewhere = scores(numbers | {"stock_bf16.a8": row(1.0) | {"source": "another host"}}, endless=0.96)
    assert "agents.vs_bf16" not in elsewhere and elsewhere["agents.tiers_vs_static"].value == 2.0
    assert "agents.curve.stock_bf16.8" not in elsewhere and "agents.curve.stock_bf16.16" in elsewhere
    elsewhere = scores(numbers | {"kvc_tiers.a32": row(1.0, 0.9) | {"source": "another host"}}, endless=0.96)
    assert elsewhere["agents.hit_of_endless_2x"].baseline.startswith("32 agents (another host); ")
    assert "agents.tiers_vs_static" not in elsewhere
    ended = scores(numbers | {"kvc_tiers.a64": row(2.1)}, endless=0.96)
    assert "at least" not in ended["agents.vs_bf16"].unit and ended["agents.vs_bf16"].value == 4.0


def test_knee_is_where_hit_rate_drops():
    def rows(*hits):
        return [(8 * (i + 1), {"from_cache": hit}) for i, hit in enumerate(hits)]

    assert knee(rows(0.95, 0.9, 0.85, 0.9), endless=0.96) == 16
    assert knee(rows(0.95, 0.9), endless=0.96) is knee(rows(0.8, 0.9), endless=0.96) is None
    assert knee(rows(None), endless=0.96) is None


def test_curve_ends_where_target_is_missed(monkeypatch, tmp_path):
    slow = {"first_token_s_p90": 3.0, "output_token_s_p90": 0.01, "from_cache": 0.5}
    rows = iter([slow | {"first_token_s_p90": 1.0}, slow, slow])
    monkeypatch.setattr(agent_replay.requests, "get", lambda *args, **k: Models())
    monkeypatch.setattr(agent_replay.Replay, "run", lambda *args, **k: next(rows))
    monkeypatch.setattr(agent_replay, "RESULTS", tmp_path)
    monkeypatch.setattr(agent_replay.common, "RESULTS", tmp_path)
    common = ["traces", "--url", "x", "--append", "--name", "r"]

    def recorded():
        return json.loads((tmp_path / "r.json").read_text())["numbers"]

    args = agent_replay.arguments([*common, "--curve", "2,4,8", "--until-missed"])
    agent_replay.measure(args, "x", [session("a")])
    assert {"server.a2", "server.a4"} == {name for name in recorded() if ".a" in name}
    assert recorded()["most_agents"] == {"server": 2}
    rows = iter([slow])
    agent_replay.measure(agent_replay.arguments([*common, "--server", "b", "--curve", "4"]), "x", [session("a")])
    assert {"server.a2", "server.a4", "b.a4"} == {name for name in recorded() if ".a" in name}
    with pytest.raises(SystemExit, match="other settings"):
        agent_replay.measure(agent_replay.arguments([*common, "--seconds", "5"]), "x", [session("a")])


class Models:
    def json(self):
        return {"data": [{"id": "m"}]}


def test_arms_have_equal_memory():
    arms = agent_servers.arms(agent_replay.arguments(["--list-arms", "--tokens", "1000", "--host-gb", "5"]))
    assert {name: options[options.index("--max-total-tokens") + 1] for name, options in arms.items()} == {
        "stock_bf16": "1000", "stock_fp8": "2000", "stock_fp8_hicache": "2000", "kvc": "1000", "kvc_tiers": "1000"
    }  # fmt: skip
    assert "5GB" in arms["kvc_tiers"]
    hicache = arms["stock_fp8_hicache"]
    assert hicache[hicache.index("--hicache-size") + 1] == "5"


def test_options_are_added_to_an_arm():
    args = agent_replay.arguments(["--list-arms"])
    flags, options = agent_servers.arm(args, "kvc_tiers+share-0.5+interval-16+mixed+floor-k4v2+reuse+done")
    assert flags == agent_servers.arms(args)["kvc_tiers"] + [
        "--kvc-running-share", "0.5", "--prefill-decode-interval", "16", "--enable-mixed-chunk", "--kvc-floor", "k4v2",
        "--kvc-eviction", "reuse",
    ] and options.done and not options.steps  # fmt: skip
    assert agent_servers.arm(args, "stock_fp8") == (agent_servers.arms(args)["stock_fp8"], Options())
    for wrong in ("kvd", "kvc+shares-1", "kvc+share-x", "kvc+"):
        with pytest.raises(SystemExit):
            agent_replay.arguments(["traces", "--arm", f"kvc,{wrong}"])


def test_disk_arm_adds_only_disk():
    arms = agent_servers.arms(agent_replay.arguments(["--list-arms", "--disk", "d"]))
    added = [option for option in arms["kvc_disk"] if option not in arms["kvc_tiers"]]
    assert added == ["--kvc-disk", "d"] and len(arms["kvc_disk"]) == len(arms["kvc_tiers"]) + 2


def test_arms_admit_in_same_order():
    arms = agent_servers.arms(agent_replay.arguments(["--list-arms"]))
    assert all(options[options.index("--schedule-policy") + 1] == "hrrn" for options in arms.values())
    assert all({"--enable-cache-report", "--enable-metrics"} <= {*options} for options in arms.values())
    assert [name for name, options in arms.items() if "--kvc-eviction" in options] == ["kvc_tiers"]


HICACHE_METRICS = """\
# TYPE sglang:hicache_host_total_tokens gauge
sglang:hicache_host_total_tokens{tp_rank="0"} 5000.0
# TYPE sglang:load_back_bytes_total counter
sglang:load_back_bytes_total{tp_rank="0"} 3e+06
sglang:load_back_bytes_total{tp_rank="1"} 2e+06
# TYPE sglang:load_back_tokens_total counter
sglang:load_back_tokens_total{tp_rank="0"} 7.0
"""


def test_hierarchical_cache_reports_bytes_of_all_ranks():
    assert agent_servers.hicache_counters(HICACHE_METRICS) == {"host_saved_bytes": 0, "host_loaded_bytes": 5e6}
    assert agent_servers.hicache_counters("sglang:num_running_reqs 3.0\n") == {}


def test_streamed_answer_is_timed():
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            assert body["prompt"] == [5, 6, 7] and body["max_tokens"] == 3 and body["stream"]
            assert body.get("custom_params") == {DONE: True}
            self.send_response(200)
            self.end_headers()
            usage = {"prompt_tokens": 3, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
            for event in [{"choices": [{"text": "x"}]}] * 3 + [{"choices": [], "usage": usage}]:
                time.sleep(0.05)
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                self.wfile.flush()
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    answer = Completions(f"http://127.0.0.1:{server.server_port}").complete([5, 6, 7], 3, {DONE: True})
    server.shutdown()
    assert (answer.tokens, answer.prompt, answer.cached) == (3, 3, 2)
    assert 0.04 < answer.first_token < answer.seconds - 0.1


@pytest.fixture
def bfcl(monkeypatch):
    """Loader of arguments and sessions of the workload `bfcl`, with a few short dialogues."""
    monkeypatch.setattr(dialogues.taskdata, "load", lambda path: {"agents_long": DATA})
    monkeypatch.setattr(dialogues.prompts, "tokenizer", lambda model: Letters())

    def load(*argv):
        args = ["--workload", "bfcl", "--data", "none", "--model", "none", "--url", "x", "--think", "3", *argv]
        parsed = agent_replay.arguments(args)
        return parsed, agent_replay.load(parsed)

    return load


def test_dialogue_prompts_extend_previous_prompt(bfcl):
    _, sessions = bfcl()
    assert len(sessions) == len(DATA["traces"])
    for s in sessions:
        played = list(prompts(s, "0 0"))
        assert [(step.prompt, step.answer) for step, _ in played] == [(len(p), step.answer) for step, p in played]
        assert played[0][0].shared == s.tools > 0
        for (_, before), (step, prompt) in itertools.pairwise(played):
            assert step.shared == len(before) == common_prefix(before, prompt)
        again = next(prompts(s, "0 1"))[1]
        assert common_prefix(played[0][1], again) == s.tools and len(again) == len(played[0][1])
    played = list(prompts(sessions[0], "0 0"))
    assert text(played[0][1]).startswith("<system>")
    call = DATA["traces"][0]["turns"][0]["calls"][0][0]
    assert played[0][0].answer == 3 + len(call) + 1
    assert text(played[1][1][len(played[0][1]) :]).endswith("</><user>Result: done\n</><assistant>")
    assert "Done.</><user>" in text(played[2][1][len(played[1][1]) :])


def test_dialogues_have_calls_pauses_and_scale(bfcl):
    _, sessions = bfcl("--tool-seconds", "4", "--pause", "5", "--time-scale", "0.5")
    pauses = [step.pause for s in sessions for step in s.steps]
    assert 0.5 < sum(pauses) / len(pauses) < 2 and max(pauses) <= 2.5
    _, still = bfcl("--tool-seconds", "0")
    assert not any(step.pause for s in still for step in s.steps)
    _, half = bfcl("--length-scale", "0.5")
    for short, full in zip(half, sessions):
        assert len(short.steps) == len(full.steps) and short.tools == round(full.tools / 2)
        assert short.longest == pytest.approx(full.longest / 2, rel=0.1)
        assert all(step.prompt == len(prompt) for step, prompt in prompts(short, "0"))
    _, joined = bfcl("--join", "2")
    assert [len(s.steps) for s in joined] == [2 * len(s.steps) for s in sessions]


def test_endless_share_is_hit_rate_of_cache_that_forgets_nothing(bfcl):
    args, sessions = bfcl()
    server, counted = Cache(), []
    for number in ("first", "second"):
        counted = [(server.complete(p, 1).cached, len(p)) for s in sessions for _, p in prompts(s, number)]
    hits, total = map(sum, zip(*counted))
    assert agent_replay.settings_of(args, sessions)["endless"] == pytest.approx(hits / total, abs=1e-9)


def test_tools_count_as_sent_before_from_second_session_on(bfcl):
    _, sessions = bfcl("--tool-seconds", "0")
    replay = Replay(Cache(), sessions, 1)
    row = replay.run(0.3, ramp=5)
    assert row["computed_again"] == 0 and 0.3 < row["from_cache"] < 1
    tools = {s.tools for s in sessions}
    assert {prompt.shared for prompt in replay.answered} >= tools

    class Empty(Cache):
        def complete(self, prompt, answer, hints=None):
            return replace(super().complete(prompt, answer), cached=0)

    forgot = Replay(Empty(), sessions, 1).run(0.3, ramp=5)
    assert forgot["from_cache"] == 0 and forgot["computed_again"] == pytest.approx(
        agent_replay.traces.endless_share(sessions), abs=0.05
    )


class FullHits(BaseHTTPRequestHandler):
    """The endpoints that the command uses. All prompt tokens except the last come from the cache."""

    def do_GET(self):
        stats = {"host_saved_bytes": 5, "disk_read_bytes": 7, "blocks": 1}
        info = {"internal_states": [{"kvc": {"stats": stats}}]}
        bodies = {"/v1/models": {"data": [{"id": "m"}]}, "/server_info": info}
        self.reply(json.dumps(bodies[self.path]).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert body["model"] == "m" and all(isinstance(i, int) for i in body["prompt"])
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        usage["prompt_tokens_details"] = {"cached_tokens": len(body["prompt"]) - 1}
        events = [{"choices": [{"text": "x"}]}, {"choices": [], "usage": usage}]
        self.reply(b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events))

    def reply(self, data):
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


def test_command_measures_dialogues(bfcl, monkeypatch, tmp_path):
    monkeypatch.setattr(agent_replay, "RESULTS", tmp_path)
    monkeypatch.setattr(agent_replay.common, "RESULTS", tmp_path)
    server = ThreadingHTTPServer(("127.0.0.1", 0), FullHits)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    argv = ["agent_replay", "--url", f"http://127.0.0.1:{server.server_port}", "--curve", "1,2", "--seconds", "0.3",
            "--tool-seconds", "0"]  # fmt: skip
    monkeypatch.setattr("sys.argv", [*argv, "--workload", "bfcl", "--data", "none", "--model", "none"])
    agent_replay.main()
    server.shutdown()
    (file,) = (tmp_path / "e2e").iterdir()
    numbers = json.loads(file.read_text())["numbers"]
    row = numbers["server.a2"]
    assert file.name == "agent_replay_bfcl_cpu.json" and numbers["most_agents"] == {"server": 2}
    assert row["from_cache"] > 0.9 and row["computed_again"] == 0 and row["sessions_h"] > 0
    assert row["tiers"] == {"host_saved_bytes": [5, 5], "disk_read_bytes": [7, 7]}
    assert {f"{k}_p{q}" for k in ("first_token_s", "output_token_s") for q in (50, 90, 99)} <= row.keys()
    assert numbers["settings"]["workload"] == "bfcl" and numbers["settings"]["join"] == 1


def test_workloads_do_not_share_result_file(bfcl, monkeypatch, tmp_path):
    monkeypatch.setattr(agent_replay, "RESULTS", tmp_path)
    args, sessions = bfcl("--name", "r", "--append")
    settings = agent_replay.settings_of(args, sessions)
    (tmp_path / "r.json").write_text(json.dumps({"numbers": {"settings": settings}}))
    assert agent_replay.settings_of(args, sessions)["workload"] == "bfcl"
    with pytest.raises(SystemExit, match="other settings"):
        agent_replay.settings_of(*bfcl("--name", "r", "--append", "--tool-seconds", "3"))
    recorded = agent_replay.arguments(["traces", "--url", "x", "--append", "--name", "r"])
    with pytest.raises(SystemExit, match="other settings"):
        agent_replay.settings_of(recorded, sessions)


def test_result_file_without_workload_has_traces(bfcl, monkeypatch, tmp_path):
    monkeypatch.setattr(agent_replay, "RESULTS", tmp_path)
    sessions = [session("s")]
    args = agent_replay.arguments(["traces", "--url", "x", "--append", "--name", "r"])
    settings = agent_replay.settings_of(args, sessions)
    earlier = {k: v for k, v in settings.items() if k != "workload"}
    (tmp_path / "r.json").write_text(json.dumps({"numbers": {"settings": earlier}}))
    assert agent_replay.settings_of(args, sessions) == settings == earlier | {"workload": "traces"}
    with pytest.raises(SystemExit, match="other settings"):
        agent_replay.settings_of(*bfcl("--name", "r", "--append"))


def test_scores_of_workloads_have_different_names():
    slow, fast = ({"first_token_s_p90": s, "output_token_s_p90": 0.02, "from_cache": 0.5} for s in (3.0, 1.0))
    numbers = {"kvc_tiers.a8": fast, "stock_fp8.a8": fast, "stock_fp8.a16": slow}
    points = ("vs_fp8", "curve.kvc_tiers.8", "curve.stock_fp8.8", "curve.stock_fp8.16")
    named = scores(numbers, 0.9, agent_replay.SCORE_PREFIXES["bfcl"])
    assert named.keys() == {f"agents.bfcl.{point}" for point in points}
    assert scores(numbers, 0.9).keys() == {f"agents.{point}" for point in points}


@pytest.mark.parametrize("argv", ["traces --workload bfcl", "", "--workload bfcl --text"])
def test_options_of_other_workload_are_refused(argv):
    with pytest.raises(SystemExit):
        agent_replay.arguments([*argv.split(), "--url", "x"])
