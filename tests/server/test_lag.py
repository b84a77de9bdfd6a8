"""A server that plans an answer as a whole (`--kvc-lag`) and retracts a running request every 12 steps."""

from __future__ import annotations

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from .conftest import BLOCK, STOCK, border, tokens

LAG, ANSWER = 2 * BLOCK, 8 * BLOCK
pytestmark = pytest.mark.skipif(STOCK, reason="stock SGLang drops no tokens")
END = {"ignore_eos": True}


def computed(client) -> float:
    """Tokens that prefills have computed since the server's start."""
    families = text_string_to_metric_families(requests.get(client.url + "/metrics", timeout=60).text)
    name, mode = "sglang:realtime_tokens_total", "prefill_compute"
    return sum(s.value for f in families for s in f.samples if s.name == name and s.labels["mode"] == mode)


def test_long_answer_shrinks_to_its_budget(lagged, rng):
    """All blocks together take about an eighth of the bytes of bf16. A prompt that continues the answer hits them."""
    prompt = tokens(rng, 3 * BLOCK)
    answer = lagged.client.generate(prompt, ANSWER, sampling=END)
    assert len(answer.ids) == ANSWER
    stats = lagged.client.when_idle()
    again = lagged.client.generate([*prompt, *answer.ids], 2)
    assert again.cached_tokens == border(len(prompt) + ANSWER - 1)
    assert 7 < stats["ratio_body"] < 9


def test_retracted_requests_compute_only_open_blocks_again(lagged, rng):
    """A retracted request resumes from its blocks, also those that the lag has not planned yet."""
    batch, before = [tokens(rng, (3 + i) * BLOCK + 9) for i in range(3)], computed(lagged.client)
    answers = lagged.client.generate_many(batch, 2 * BLOCK, parallel=3, sampling=END)
    retractions = sum(a.meta["num_retractions"] for a in answers)
    assert retractions > 3 and all(len(a.ids) == 2 * BLOCK for a in answers)
    again = computed(lagged.client) - before - sum(map(len, batch))
    assert 0 < again <= retractions * BLOCK
