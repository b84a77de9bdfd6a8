"""Answers token by token: with bf16 pages only, concurrent requests, retraction and eviction change nothing.

Two runs of one prompt in batches of different sizes differ in the last bits of the model's own matrix products, and
stock SGLang's answers also diverge for this reason. So where two answers diverge, the two candidates must be close, and
up to that point the tokens' log-probabilities must agree: a damaged block violates both. The server retracts a running
request every 12 steps (SGLANG_TEST_RETRACT) and holds fewer tokens than the tests send.
"""

from __future__ import annotations

import pytest

from bench import prompts
from bench.compare import match

from .conftest import BLOCK, DRIFT, EXACT, TIE, border, tokens


@pytest.fixture(scope="module")
def tok(servers):
    from bench.common import demo_model

    return prompts.tokenizer(demo_model())


def assert_same(alone, company):
    matches = [match(a, b) for a, b in zip(alone, company)]
    mismatches = [
        (i, m.to_dict()) for i, m in enumerate(matches) if not (m.same or m.gap <= TIE) or m.drift > DRIFT
    ]
    assert not mismatches, mismatches


def test_logprobs_of_prompts_match_transformers(exact, tok, off_by):
    """Two runs of a server that packs would agree with each other, but not with another implementation."""
    prompt = prompts.cut(tok, prompts.prose(), 7 * BLOCK + 10)
    assert off_by(exact.client.generate(prompt, 1, input_from=BLOCK - 1), prompt) < EXACT


def test_rows_are_reused_at_once(exact, tok):
    """Many short requests run among long ones, so that rows of finished requests are reused at once."""
    long = [prompts.cut(tok, prompts.prose(), 150, start=900 * i) for i in range(3)]
    short = [prompts.cut(tok, prompts.prose(), 10 + 7 * i, start=50_000 + 100 * i) for i in range(14)]
    alone = [exact.client.generate(p, 24, top=3) for p in long]
    exact.client.flush()
    mixed = [*long, *short]
    lengths = [24] * len(long) + [1 + i % 5 for i in range(len(short))]
    answers = exact.client.generate_each(mixed, lengths, parallel=7, top=3)
    assert [len(a.ids) for a in answers] == lengths
    assert_same(alone, answers[: len(long)])


def test_retracted_requests_give_same_answers(exact, tok):
    """Retracted requests restart from their blocks in the tree."""
    batch = [prompts.cut(tok, prompts.prose(), 90 + 60 * i, start=1300 * i) for i in range(3)]
    alone = [exact.client.generate(p, 26, top=3) for p in batch]
    exact.client.flush()
    answers = exact.client.generate_many(batch, 26, parallel=4, top=3)
    assert sum(a.meta["num_retractions"] for a in answers) > 0, "nothing was retracted"
    assert_same(alone, answers)


def test_answers_stay_right_under_eviction(exact, tok):
    """Requests need more memory than there is, twice; answers stay right, and running requests keep their blocks."""
    batch = [prompts.cut(tok, prompts.prose(), 330, start=2000 * i) for i in range(5)]
    first = [exact.client.generate(p, 8, top=3) for p in batch]
    again = exact.client.generate_many(batch, 8, parallel=3, top=3)
    assert sum(a.cached_tokens for a in again) < sum(a.prompt_tokens for a in again) - 5 * BLOCK, "all fitted"
    assert_same(first, again)


def test_warm_answers_equal_cold_ones(exact, tok):
    """A cached prefix gives the same answer as computing it, at hits of 1, 4 and 9 blocks."""
    for n in (BLOCK + 5, 4 * BLOCK + 1, 9 * BLOCK + 40):
        prompt = prompts.cut(tok, prompts.chapter("types"), n)
        exact.client.flush()
        cold = exact.client.generate(prompt, 12, top=3)
        warm = exact.client.generate(prompt, 12, top=3)
        assert (cold.cached_tokens, warm.cached_tokens) == (0, border(n - 1))
        assert_same([cold], [warm])


def test_refused_and_aborted_neighbors_do_not_change_answer(exact, tok, rng):
    """The answer to a request that runs with failing ones equals its answer alone."""
    prompt = prompts.cut(tok, prompts.chapter("execmodel"), 200)
    alone = exact.client.generate(prompt, 20, top=3)
    exact.client.flush()
    bad = [tokens(rng, 9000)] * 3
    answers = exact.client.generate_each([prompt, *bad], [20] * 4, parallel=4, top=3, may_fail=True)
    assert answers[1:] == [None] * 3
    assert_same([alone], answers[:1])
