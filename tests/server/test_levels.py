"""Requests with different levels in one batch, on a server that offers a second format."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from bench.client import RequestRefused
from bench.compare import match

from .conftest import BLOCK, DRIFT, LEVEL, LOSSLESS, STOCK, TIE, tokens

MINE = {"custom_params": {"kvc": LEVEL}}
pytestmark = pytest.mark.skipif(STOCK, reason="stock SGLang has no levels")


def test_levels_in_one_batch_answer_as_alone(small, rng):
    """Each request gets the answer that it gets alone."""
    client, batch = small.client, [tokens(rng, 150 + 40 * i) for i in range(3)]
    samplings = [{}, LOSSLESS, MINE]
    alone = []
    for ids, level in zip(batch, samplings):
        client.flush()
        alone.append(client.generate(ids, 8, top=3, sampling=level))
    client.flush()
    with ThreadPoolExecutor(3) as pool:
        ask = lambda ids, level: client.generate(ids, 8, top=3, sampling=level)  # noqa: E731
        together = list(pool.map(ask, batch, samplings))
    for a, b in zip(alone, together):
        comparison = match(a, b)
        assert (comparison.same or comparison.gap <= TIE) and comparison.drift < DRIFT, comparison.to_dict()
    # The level matters: the same prompt at another level gives different log-probabilities.
    for ids, before in zip(batch[1:], together[1:]):
        other = client.generate(ids, 8, top=3)
        assert other.cached_tokens == 0 and other.logprobs != before.logprobs


def test_request_format_is_stored_and_hit(small, rng):
    """Blocks of a request with another level are stored in that format and hit only at that level."""
    client = small.client
    prompt = tokens(rng, 4 * BLOCK + 7)
    cold = client.generate(prompt, 12, top=3, sampling=MINE)
    assert client.when_idle()["blocks_by_format"] == {"bf16": 0, "k4v4": 0, LEVEL: 4}
    warm = client.generate(prompt, 12, top=3, sampling=MINE)
    assert warm.cached_tokens == 4 * BLOCK
    comparison = match(cold, warm)
    assert comparison.same and comparison.drift < 1e-3, comparison.to_dict()
    # The name of the server's own format equals the default.
    client.generate(prompt, 4, sampling={"custom_params": {"kvc": "k4v4"}})
    assert client.generate(prompt, 4).cached_tokens == 4 * BLOCK
    assert client.when_idle()["blocks_by_format"] == {"bf16": 0, "k4v4": 4, LEVEL: 4}


def test_offered_levels_are_named(small, rng):
    with pytest.raises(RequestRefused, match=LEVEL) as refused:
        small.client.generate(tokens(rng, 20), 4, sampling={"custom_params": {"kvc": "k2v2"}})
    assert refused.value.status == 400
