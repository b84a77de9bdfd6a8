"""The agents' bench: what its sessions say, and that its account of a cache is right, with a client that keeps one."""

import json
from types import SimpleNamespace

import pytest

from bench import common
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
STEPS = 5  # of a dialogue: a call, the user told; two calls, the user told


class Letters:
    """A tokenizer with a token a character."""

    def __call__(self, text, add_special_tokens):
        return SimpleNamespace(input_ids=[ord(c) for c in text])

    def apply_chat_template(self, messages, add_generation_prompt, tokenize):
        return "".join(f"<{m['role']}>{m['content']}</>" for m in messages) + "<assistant>" * add_generation_prompt


class Cache:
    """A server that remembers the last `capacity` requests and what it said to them, whole."""

    def __init__(self, capacity=10**9):
        self.capacity, self.kept, self.asked = capacity, [], []

    def flush(self):
        self.kept = []

    def generate(self, history, answer):
        hit = max((common_prefix(history, old) for old in self.kept), default=0)
        ids = [len(self.asked)] * answer
        self.asked.append(list(history))
        self.kept = [*self.kept, [*history, *ids]][-self.capacity :]
        return SimpleNamespace(ids=ids, cached_tokens=hit)


def common_prefix(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def made(*argv):
    a = agents.arguments(["--model", "none", "--agents", "4", "--each", "1", "--read", "50", "--think", "3", *argv])
    return agents.sessions(DATA, "abcdefghij" * 10, Letters(), a), a


@pytest.mark.parametrize("join", [1, 2])
def test_sessions(join):
    some, _ = made("--join", str(join), "--each", "2")
    assert len(some) == 8 and some == made("--join", str(join), "--each", "2")[0]
    assert all(len(s.steps) == STEPS * join for s in some)
    heads = {}
    for s in some:
        assert heads.setdefault(s.functions, s.steps[0].sent[: s.head]) == s.steps[0].sent[: s.head]
        first = "".join(map(chr, s.steps[0].sent))
        assert first.startswith("<system>") and first.endswith("</><assistant>") and "<user>" in first[s.head - 6 :]
        text = "".join(map(chr, s.steps[1].sent))
        assert text.startswith("</><user>Result: done\n") and text.endswith("</><assistant>")
        assert s.steps[0].answer == 3 + len("ls_0(0)") + 1 and s.steps[1].answer == 3 + 2
    assert len(heads) == 3 and len({len(h) for h in heads.values()}) == 3


def test_an_endless_cache_has_what_was_sent_before():
    some, _ = made("--agents", "1", "--each", "6", "--join", "1")
    server = Cache()
    row = agents.measure(server, some, 1, 0.0)
    assert row["steps"] == len(server.asked) == 6 * STEPS
    said, seen = 0, set()
    for i, (asked, step) in enumerate(zip(server.asked, [step for s in some for step in s.steps])):
        session, first = some[i // STEPS], i % STEPS == 0
        said += session.head * (session.functions in seen) if first else len(asked) - len(step.sent)
        seen.add(session.functions)
    assert row["endless_cache"] == said / row["prompt_tokens"]
    # Dialogues repeat after four sessions, and heads of other functions begin alike: a real cache has more.
    assert row["endless_cache"] < row["from_cache"] < 1
    assert row["computed_tokens"] == sum(map(len, server.asked)) - row["cached_tokens"]
    # What a model said is part of the history of the next step.
    said = len(server.asked[0]) + some[0].steps[0].answer
    assert server.asked[1][:said] == server.asked[0] + [0] * some[0].steps[0].answer
    small = agents.measure(Cache(1), some, 3, 0.001)
    assert small["endless_cache"] < 0.95 and small["from_cache"] < row["from_cache"]


def test_scores_and_table(monkeypatch):
    _, a = made("--agents", "2,4")
    numbers = {
        f"{n}.a{c}": {"steps_s": float(s * c), "from_cache": 0.1 * s, "options": []}
        for s, n in enumerate(("bf16", "fp8", "kvc_k4v4"), 1)
        for c in (2, 4)
    }
    assert agents.table(numbers).splitlines()[2].split() == ["bf16.a4", "4", "0.1"]
    monkeypatch.setattr(common, "has_gpu", lambda: True)
    found = agents.scores(numbers, a)
    assert found["e2e.agents.vs_bf16"] == (3.0, "x steps/s, 4 agents") and found["e2e.agents.vs_fp8"][0] == 1.5
    assert found["e2e.agents.from_cache.kvc_k4v4"][0] == pytest.approx(0.3)
    assert "e2e.agents.vs_bf16" not in agents.scores({k: v for k, v in numbers.items() if not k.startswith("kvc")}, a)
    assert agents.scores(numbers, made("--agents", "2,4", "--no-prefill-graphs")[1]) == {}
    options = agents.servers(a)
    assert list(options) == ["bf16", "fp8", "kvc_k4v4"] and json.dumps(options)
    assert all(o[o.index("--cuda-graph-max-bs-decode", 8) + 1] for o in options.values())


def test_calls_that_share_a_result_file(monkeypatch, tmp_path):
    """Two, a server each, the second started before the first wrote: nothing is lost."""

    class Running:
        def __init__(self, options, model):
            self.client, self.log, self.errors = Cache(), tmp_path / "log", list
            self.log.touch()

        __enter__ = lambda self: self  # noqa: E731
        __exit__ = lambda *_: None  # noqa: E731

    monkeypatch.setattr(common, "Server", Running)
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(agents.serving, "RESULTS", tmp_path)
    monkeypatch.setattr(agents.prompts, "tokenizer", lambda model: Letters())
    monkeypatch.setattr(agents.taskdata, "load", lambda path: {"agents": DATA, "essays": "abc"})
    argv = ["agents", "--model", "none", "--agents", "2", "--read", "5", "--pause", "0", "--data", "none", "--append"]
    measure, inner = agents.measure, []

    def both(*args):
        if not inner:
            inner.append(1)
            run("kvc_k4v4")
        return measure(*args)

    def run(server):
        monkeypatch.setattr("sys.argv", [*argv, "--only", server])
        agents.main()

    monkeypatch.setattr(agents, "measure", both)
    run("bf16")
    record = json.loads((tmp_path / "e2e" / "agents.json").read_text())
    assert set(record["numbers"]) == {"longest", "bf16.a2", "kvc_k4v4.a2"}
    assert any("vs_bf16" in name for name in record["scores"])
    assert [p.name for p in (tmp_path / "e2e").iterdir()] == ["agents.json"]
