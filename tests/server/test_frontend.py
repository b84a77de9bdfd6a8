"""The program of docs/frontend.md: forks hit their common prefix, and choices and regular expressions hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench import prompts
from bench.common import demo_model

from .conftest import BLOCK

GUIDE = Path(__file__).parents[2] / "docs" / "frontend.md"


@pytest.fixture(scope="module")
def program() -> dict:
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    names: dict = {"__name__": "frontend"}
    exec(compile(code, str(GUIDE), "exec"), names)
    return names


@pytest.mark.cpu_only  # a grammar backend, which `ON_GPU` does without
def test_program_with_forks(packed, program):
    tok = prompts.tokenizer(demo_model())
    text = tok.decode(prompts.cut(tok, prompts.chapter("execmodel"), 5 * BLOCK))
    state = program["run"](packed.url, text)
    assert state["kind"] in ("A manual.", "A poem.", "A recipe.")
    assert re.fullmatch(r"[1-5] of 5", state["rating"])
    assert len(state["answers"]) == len(program["QUESTIONS"]) and all(state["answers"])
    # The text alone fills 5 blocks; each fork's prompt is its common prefix and a question.
    common = len(tok(state.text().partition(state["kind"])[0])["input_ids"])
    for cached in state["cached"]:
        assert cached % BLOCK == 0 and 5 * BLOCK <= cached
        assert cached >= common // BLOCK * BLOCK

    again = program["run"](packed.url, text)
    assert (again["kind"], again["answers"], again["rating"]) == (state["kind"], state["answers"], state["rating"])
