"""The sanitizer run: the kernels it watches, how it reads the tool's log, and that silence is not a pass."""

import json
import re
import sys

import pytest

from bench.kernels import sanitizer
from bench.revision import ROOT

LOG = f"""========= COMPUTE-SANITIZER
============================= test session starts ==============================
collecting ... collected 5 items

tests/gpu/test_a.py::test_one[x y-1] PASSED [ 20%]
tests/gpu/test_a.py::test_two ========= Error: Race reported between Write access at extend+0x10
=========     and Read access at extend+0x20 [192 hazards]
=========
========= Error: Race reported between Write access at join+0x30
=========     and Write access at join+0x40 [32 hazards]
FAILED [ 40%]
tests/gpu/test_a.py::test_three ========= Invalid __global__ write of size 4 bytes
=========     at extend+0x10
PASSED [ 60%]
tests/gpu/test_a.py::test_four SKIPPED (needs a CUDA device) [ 80%]
tests/gpu/test_a.py::test_five FAILED [100%]

=================================== FAILURES ===================================
{ROOT}/tests/gpu/test_a.py:31: AssertionError: assert tensor(0.8) < 0.03
/somewhere/torch/random.py:9: RuntimeError: CUDA error
tests/gpu/test_a.py::test_one[x y-1]
FAILED tests/gpu/test_a.py::test_one[x y-1]
=================== 2 failed, 2 passed, 1 skipped in 9.0s ======================
"""


def test_every_launched_kernel_is_watched():
    names, launched = sanitizer.kernel_names(), set()
    for path in (ROOT / "kernels").rglob("*.py"):
        text = path.read_text()
        jits = set(re.findall(r"^def (\w+)\(", text, re.M))
        launched |= {n for n in re.findall(r"\b(\w+)\[[^\n]*\]\(", text) if n in jits}
    assert len(launched) > 15 and launched <= set(names)
    assert {"extend", "merge", "decode_kernel", "merge_kernel"} <= set(names)


def test_log_is_read_into_outcomes():
    rows = sanitizer.read_log(LOG)
    assert [(r["test"].split("::")[1], r["outcome"], r["errors"]) for r in rows] == [
        ("test_one[x y-1]", "passed", 0), ("test_two", "failed", 2), ("test_three", "passed", 1),
        ("test_four", "skipped", 0), ("test_five", "failed", 0),
    ]  # fmt: skip
    assert rows[1]["first"][1].startswith("Error: Race reported between Write access at join")
    whys = {r["test"].split("::")[1]: r["why"] for r in rows if "why" in r}
    assert whys["test_two"] == "tests/gpu/test_a.py:31: AssertionError: assert tensor(0.8) < 0.03"
    assert whys["test_five"].endswith("random.py:9: RuntimeError: CUDA error") and len(whys) == 2
    cut_off = LOG[: LOG.index("FAILED [ 40%]")]  # an unfinished test gives no result
    assert [r["test"].split("::")[1] for r in sanitizer.read_log(cut_off)] == ["test_one[x y-1]"]
    scores = sanitizer.scores([r | dict(tool="memcheck") for r in rows], 9)
    assert scores == {"sanitizer.memcheck": (3, "errors in 4 of 9 kernel tests, 1 failed by value")}


def test_chunks_keep_all_jobs_busy():
    ids = [f"tests/gpu/test_{f}.py::test_{i}" for f in "ab" for i in range(7)]
    todo = [(tool, test) for test in ids for tool in ("memcheck", "racecheck")]
    for jobs, longest in ((2, 6), (8, 3), (100, 1)):
        chunks = sanitizer.chunks(todo, jobs)
        assert sorted((tool, t) for tool, tests in chunks for t in tests) == sorted(todo)
        assert max(len(tests) for _, tests in chunks) == longest
        assert all(len({sanitizer.file_of(t) for t in tests}) == 1 for _, tests in chunks)
        assert chunks[0] == ("racecheck", ids[:longest])
    slow = [("memcheck", f"{sanitizer.LONGEST[1]}::test_{i}") for i in range(2)]
    slow.append(("racecheck", f"{sanitizer.LONGEST[0]}::test_0"))
    chunks = sanitizer.chunks(todo + slow, 2)
    assert chunks[:3] == [(tool, [test]) for tool, test in (slow[2], slow[0], slow[1])] and len(chunks[3][1]) == 6


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """`bench(sees)`: exit status and rows of a run over one test; the tool sees the planted error or misses it."""
    test = "tests/kernels/append/test_gpu.py::test_one"
    out = tmp_path / "out.json"
    monkeypatch.setattr(sanitizer.shutil, "which", lambda name: name)
    monkeypatch.setattr(sanitizer, "collect", lambda paths: [test])

    def call(sees: bool) -> tuple[int, list[dict]]:
        summary = f"ERROR SUMMARY: {int(sees)} error"
        monkeypatch.setattr(sanitizer.Sanitizer, "run", lambda *_: f"{test} PASSED\n========= {summary}\n")
        argv = ["--tools", "memcheck", "--jobs", "1", "--out", str(out), test]
        monkeypatch.setattr(sys, "argv", ["sanitizer", *argv])
        return sanitizer.main(), json.loads(out.read_text())["rows"] if out.exists() else []

    call.out = out
    return call


def test_tool_that_misses_planted_error_gives_no_result(bench, capsys):
    assert bench(False) == (1, []) and "its results do not count" in capsys.readouterr().out


def test_rows_are_kept_while_sources_are_unchanged(bench):
    status, rows = bench(True)
    assert status == 0 and [(r["tool"], r["outcome"]) for r in rows] == [("memcheck", "passed")]
    earlier = [rows[0] | {"date": "kept"}, rows[0] | {"test": "tests/test_gone.py::test_x"}]
    bench.out.write_text(json.dumps({"rows": earlier}))
    assert bench(True) == (0, earlier[:1])
    for changed in ({"sources": "older"}, {"errors": 1}):
        bench.out.write_text(json.dumps({"rows": [earlier[0] | changed]}))
        assert bench(True) == (0, rows)
