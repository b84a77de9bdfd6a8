"""The agents' benchmark: the text of its sessions, and its cache accounting with a client that simulates a cache."""

import json
import time
from collections import Counter
from types import SimpleNamespace

import pytest

from bench import common
from bench.client import RequestRefused
from bench.e2e import agents

DATA = {
    "functions": {
        name: [{"name": f"{name}_{i}", "purpose": "Do it.", "parameters": {}, "required": []} for i in range(n)]
        for name, n in (("ls", 2), ("mail", 3))
    },
    "traces": [
        {
            "classes": classes,
            "turns": [{"user": f"{i} {t}", "calls": [[f"ls_0({i})", "done"]] * (1 + t)} for t in range(2)],
        }
        for i, classes in enumerate([["ls"], ["mail"], ["ls", "mail"], ["ls"]])
    ],
}
STEPS = 5  # steps per dialogue: a call and a reply to the user, then two calls and a reply


class Letters:
    """A tokenizer with one token per character."""

    def __call__(self, text, add_special_tokens):
        return SimpleNamespace(input_ids=[ord(c) for c in text])

    def apply_chat_template(self, messages, add_generation_prompt, tokenize):
        return "".join(f"<{m['role']}>{m['content']}</>" for m in messages) + "<assistant>" * add_generation_prompt


class Cache:
    """A server that remembers the last `capacity` requests and its answers to them."""

    def __init__(self, capacity=10**9, seconds=0.001):
        self.capacity, self.seconds, self.kept, self.prompts = capacity, seconds, [], []

    def flush(self):
        self.kept = []

    def post(self, path, body):
        assert path == "/abort_request" and body == {"abort_all": True}

    def generate(self, history, answer):
        time.sleep(self.seconds)
        hit = max((common_prefix(history, old) for old in self.kept), default=0)
        ids = [len(self.prompts)] * answer
        self.prompts.append(list(history))
        self.kept = [*self.kept, [*history, *ids]][-self.capacity :]
        return SimpleNamespace(ids=ids, cached_tokens=hit)


def common_prefix(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def make_sessions(*argv):
    args = agents.arguments(["--model", "none", "--curve", "4", "--think", "3", *argv])
    return agents.Sessions(DATA, "abcdefghij" * 10, Letters(), args)


def text(ids):
    return "".join(map(chr, ids))


@pytest.mark.parametrize("join", [1, 2])
def test_sessions_are_reproducible_and_share_tool_prompts(join):
    sessions = [make_sessions("--join", str(join)).session(i) for i in range(8)]
    assert sessions == [make_sessions("--join", str(join)).session(i) for i in range(8)]
    assert all(len(s.steps) == STEPS * join for s in sessions)
    heads = {}
    for i, s in enumerate(sessions):
        assert heads.setdefault(s.functions, s.steps[0].sent[: s.head]) == s.steps[0].sent[: s.head]
        first = text(s.steps[0].sent)
        assert first.startswith("<system>") and first.endswith("</><assistant>")
        assert text(s.steps[0].sent[s.head :]).startswith(f"Session {i}.\n")
        assert text(s.steps[1].sent) == "</><user>Result: done\n</><assistant>"
        assert s.steps[0].answer == 3 + len("ls_0(0)") + 1 and s.steps[1].answer == 3 + 2
    assert len(heads) == 3 and len({len(h) for h in heads.values()}) == 3
    # Dialogues repeat after four sessions, but each session's text is unique from its first message on.
    assert common_prefix(sessions[0].steps[0].sent, sessions[4].steps[0].sent) < sessions[0].head + len("Session 4")


def test_filler_tokens_are_counted():
    plain, filled = make_sessions(), make_sessions("--read", "50")
    shares = filled.composition(8)["shares"]
    assert 0.8 < sum(shares.values()) < 1 and plain.composition(8)["shares"]["filler"] == 0 < shares["filler"]
    more = filled.session(0).tokens - plain.session(0).tokens
    assert more == sum(step.parts["filler"] for step in filled.session(0).steps) > 0


def test_session_ends_before_length_limit():
    full, cut = make_sessions().session(0), make_sessions("--longest", "400").session(0)
    assert cut.tokens <= 400 < full.tokens and cut.steps == full.steps[: len(cut.steps)]
    assert len(make_sessions("--longest", "1").session(0).steps) == 1


def test_steps_are_counted_after_ramp_up():
    server = Cache()
    load = agents.Load(server, make_sessions(), 3, 0.002)
    row = load.run(0.3)
    inside = [s for s in load.answered if not s.first]
    assert sum(s.first for s in load.answered) == 3 and 0 < row["steps"] <= len(inside)
    assert row["steps_s"] == pytest.approx(row["steps"] / 0.3, rel=0.2) and row["ramp_s"] < 5
    # An unbounded cache holds everything sent or answered before; system prompts of different functions begin alike, so
    # a real cache hits more.
    assert row["sent_before"] <= row["from_cache"] < 1
    # The model's answer is part of the history of the next step.
    answers = Counter(len(ids) for ids in server.prompts)
    assert len(answers) > 3
    one = agents.Load(Cache(1), make_sessions(), 3, 0.002).run(0.3)
    assert one["from_cache"] < row["from_cache"]


def test_step_keeps_answer_of_model():
    server = Cache()
    load = agents.Load(server, make_sessions(), 1, 0.0)
    load.run(0.1)
    session, prompts = make_sessions().session(1), server.prompts
    first = next(i for i, ids in enumerate(prompts) if ids == list(session.steps[0].sent))  # the agent's second session
    answer = [first] * session.steps[0].answer
    assert prompts[first + 1] == [*session.steps[0].sent, *answer, *session.steps[1].sent]
    step = load.answered[first + 1]
    assert step.repeated == len(prompts[first]) + len(answer) and step.prompt == len(prompts[first + 1])


def test_failed_agent_ends_run():
    class Broken(Cache):
        def generate(self, history, answer):
            if len(self.prompts) > 5:
                raise RequestRefused(500, "broken")
            return super().generate(history, answer)

    with pytest.raises(RequestRefused, match="broken"):
        agents.Load(Broken(), make_sessions(), 2, 0.0).run(30)
    with pytest.raises(RuntimeError, match="0 of 2 agents had an answer"):
        agents.Load(Cache(seconds=0.2), make_sessions(), 2, 0.0).run(1, ramp=0.01)


def row(steps_s, share=0.5, options=("--attention-backend", "fa3")):
    return dict.fromkeys(agents.COLUMNS, 1.0) | {"steps_s": steps_s, "from_cache": share, "options": list(options)}


def test_scores_take_fastest_stock_server(monkeypatch):
    args = make_sessions("--curve", "2,4").args
    slow = ("--attention-backend", "flashinfer")
    numbers = {"kvc_k4v4.a4": row(6.0, 0.9), "bf16.a4": row(1.0), "bf16_flashinfer.a4": row(2.0, options=slow)}
    numbers |= {"fp8_e4m3.a4": row(3.0), "fp8_e4m3_hicache.a4": row(4.0), "bf16.a2": row(1.0, 0.1)}
    assert agents.scores(numbers, args) == {}  # there are no scores without a GPU
    monkeypatch.setattr(common, "has_gpu", lambda: True)
    scores = agents.scores(numbers, args)
    assert scores["agents.steps_vs_bf16.4"][:3] == (3.0, "x steps/s", "stock bf16, flashinfer")
    assert scores["agents.steps_vs_fp8.4"].value == 2.0 and scores["agents.steps_vs_fp8_hicache.4"].value == 1.5
    assert scores["agents.curve.kvc_k4v4.4"].value == 0.9 and scores["agents.curve.bf16.2"].value == 0.1
    assert "agents.steps_vs_bf16.2" not in scores
    assert agents.scores(numbers, make_sessions("--curve", "4", "--no-prefill-graphs").args) == {}
    assert len(agents.table({"sessions": {}, **numbers}).splitlines()) == 1 + len(numbers)


def test_concurrent_calls_share_result_file(monkeypatch, tmp_path):
    """Two calls, each with its own server, the second started before the first wrote: no result is lost or measured
    twice."""
    starts = []

    class Running:
        def __init__(self, options, model):
            self.client, self.log, self.errors = Cache(), tmp_path / "log", list
            self.log.touch()
            starts.append(options)

        __enter__ = lambda self: self  # noqa: E731
        __exit__ = lambda *_: None  # noqa: E731

    monkeypatch.setattr(common, "Server", Running)
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(agents.serving, "RESULTS", tmp_path)
    monkeypatch.setattr(agents.prompts, "tokenizer", lambda model: Letters())
    monkeypatch.setattr(agents.taskdata, "load", lambda path: {"agents_long": DATA, "essays": "abc"})
    argv = ["agents", "--model", "none", "--curve", "2", "--seconds", "0.1", "--pause", "0", "--data", "none"]
    run_load, inner = agents.Load.run, []

    def both(self, *args):
        if not inner:
            inner.append(1)
            run("kvc_k4v4")
        return run_load(self, 0.1)

    def run(server):
        monkeypatch.setattr("sys.argv", [*argv, "--append", "--only", server])
        agents.main()

    monkeypatch.setattr(agents.Load, "run", both)
    run("bf16")
    (file,) = (tmp_path / "e2e").iterdir()
    record = json.loads(file.read_text())
    assert file.name == "agents_cpu.json" and set(record["numbers"]) == {"sessions", "bf16.a2", "kvc_k4v4.a2"}
    run("bf16")
    assert len(starts) == 2
