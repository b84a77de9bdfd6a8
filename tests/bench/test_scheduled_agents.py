"""Agents against the scheduler without a model."""

from __future__ import annotations

import random

import pytest

from bench.agents.options import Options
from bench.agents.scheduled import Machine, Turn, play, row
from bench.agents.traces import Session, Step
from sglang_kvc.options.request_hints import DONE, STEPS


def sessions(count: int) -> list[Session]:
    """Sessions whose prompts grow from 2000 to 8000 tokens, each by a few hundred."""
    draw, out = random.Random(0), []
    for i in range(count):
        steps, prompt = [], 2000
        for _ in range(24):
            shared, prompt = prompt if steps else 0, prompt + draw.randint(100, 400)
            steps.append(Step(prompt, shared, draw.randint(20, 60), draw.uniform(0.5, 3)))
        out.append(Session(str(i), 1000, tuple(steps)))
    return out


def answers(options: str, agents: int, tokens: int) -> list[tuple[Turn, float]]:
    return play(sessions(40), Machine(tokens=tokens), Options.parse(options), agents, 0, 20.0, 40.0)


def test_cache_that_holds_all_sessions_finds_what_they_share():
    ended = answers("share-1", 4, 20_000)
    for turn, end in ended:
        assert turn.sent <= turn.first <= end and len(turn.req.output_ids) == turn.step.answer
        assert turn.step.shared // 128 * 128 - 128 <= turn.cached <= turn.step.prompt or not turn.counts
    assert row([ended], 40.0)["from_cache"] > 0.8


def test_name_of_a_server_gives_its_options():
    assert Options.parse("share-0.5+interval-4+mixed") == Options(share=0.5, interval=4, mixed=True)
    assert Options.parse("default") == Options() and not Options().flags()
    assert Options.parse("share-1").flags() == ["--kvc-running-share", "1"]
    assert Options.parse("floor-k2v2").config(0).floor == "k2v2"
    assert Options.parse("reuse+done+steps") == Options(reuse=True, done=True, steps=True)
    for wrong in ("share-a", "shares-0.5"):
        with pytest.raises((ValueError, TypeError)):
            Options.parse(wrong)


def test_clients_send_hints_about_the_next_prompt():
    """The last prompt of a session says so, and the others how many steps the pause takes."""
    options = Options(reuse=True, done=True, steps=True)
    steps = tuple(Step(100, 0, 1, pause) for pause in (0.0, 10.0, 1.0))
    assert [options.hints(steps, at, 0.25) for at in range(3)] == [{STEPS: 4}, {STEPS: 0}, {DONE: True}]
    assert options.hints(steps, 0, 0.5) == {STEPS: 2} and not Options(reuse=True).hints(steps, 0, 0.25)


def test_decode_interval_and_mixed_chunks_give_answers():
    for options in ("interval-2", "mixed", "floor-k2v2", "reuse+done+steps"):
        assert row([answers(options, 4, 20_000)], 40.0)["from_cache"] > 0.8


@pytest.mark.slow
@pytest.mark.parametrize("limited", ["default", "share-0.5"])
def test_running_share_keeps_sessions_cached(limited):
    """With somewhat more sessions than memory, half of it for running requests makes decoding stall less."""
    free, bounded = (row([answers(share, 36, 40_000)], 40.0) for share in ("share-1", limited))
    assert bounded["from_cache"] > 1.05 * free["from_cache"]
    assert bounded["answers_h"] > 1.05 * free["answers_h"]
    assert bounded["output_token_s_p90"] < 0.7 * free["output_token_s_p90"]
