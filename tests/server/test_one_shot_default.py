"""A server that gives a budget to the prompts of all requests that name no level (`--kvc-one-shot 8x`)."""

from __future__ import annotations

import pytest
import requests

from bench import prompts

from .conftest import BLOCK, STOCK, border, tokens
from .test_one_shot import CODE, level, needle_prompt, ratios_while_running
from .test_streaming import Chat

pytestmark = pytest.mark.skipif(STOCK, reason="stock SGLang has no levels")


@pytest.fixture(scope="module")
def question():
    return needle_prompt(640, prompts.chapter("execmodel"))


def test_requests_without_custom_params_meet_ratio(budgeted, question):
    """While a request runs, the bytes of its prompt have the ratio; when it ends, all its memory is free."""
    client = budgeted.client
    before = client.when_idle()
    ratios = ratios_while_running(client, question)
    assert all(8 <= ratio < 10 for ratio in ratios), ratios
    after = client.when_idle()
    assert after["pages_free"] == before["pages_free"] and after["tokens"] == 0


def test_answer_equals_that_of_named_budget(budgeted, question):
    client = budgeted.client
    answer = client.generate(question, 16, ignore_eos=False)
    named = client.generate(question, 16, ignore_eos=False, sampling=level("one-shot:8x"))
    assert CODE in answer.text and answer.ids == named.ids and answer.cached_tokens == named.cached_tokens == 0


def test_openai_requests_get_budget(budgeted, question):
    """Clients of this API often cannot set custom_params. Each of several samples has its own budget, too."""
    client = budgeted.client
    body = {"model": "m", "prompt": question, "max_tokens": 16, "temperature": 0}
    for n in (1, 2):
        response = requests.post(client.url + "/v1/completions", json={**body, "n": n}, timeout=600)
        assert response.status_code == 200 and all(CODE in c["text"] for c in response.json()["choices"])
    assert client.when_idle()["tokens"] == 0  # nothing is left in the prefix cache


def test_named_levels_share_prefixes(budgeted, rng):
    client, prompt = budgeted.client, tokens(rng, 5 * BLOCK + 9)
    for name in ("k4v4", "lossless"):
        assert client.generate(prompt, 4, sampling=level(name)).cached_tokens == 0
        assert client.generate(prompt, 4, sampling=level(name)).cached_tokens == 5 * BLOCK
    assert client.generate(prompt, 4).cached_tokens == client.generate(prompt, 4).cached_tokens == 0


def test_short_prompts_share_prefixes(budgeted, rng):
    """The budget drops no token of a prompt of one block."""
    client, prompt = budgeted.client, tokens(rng, BLOCK + 9)
    assert [client.generate(prompt, 4).cached_tokens for _ in range(2)] == [0, BLOCK]


def test_turns_of_sessions_use_format_of_server(budgeted, rng):
    chat = Chat(budgeted)
    first, second = chat.turn(tokens(rng, 8 * BLOCK), BLOCK + 5), chat.turn(tokens(rng, 20), 5)
    chat.close()
    assert (first.cached_tokens, second.cached_tokens) == (0, border(8 * BLOCK + BLOCK + 4))


def test_server_states_default(budgeted):
    state = budgeted.client.kvc_info()
    assert state["config"]["one_shot"] == "one-shot:8x" and state["stats"]["config"].endswith(", one-shot:8x")
    limits = state["longest_prompt"]
    assert limits["default"] == max(limits["k4v4"], limits["one-shot:8x"])
    log = budgeted.log.read_text()
    assert "kvc: quantize k4v4" in log and "window 0, one-shot:8x;" in log
    assert "hits no cached prefix" in log
