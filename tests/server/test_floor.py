"""A server whose cold blocks move from k8v4 to k4v4 when its pool is full of prompts."""

from __future__ import annotations

import pytest

from bench.client import RequestRefused
from bench.compare import match

from .conftest import BLOCK, LOSSLESS, STOCK, border, tokens

NAMED = {"custom_params": {"kvc": "k8v4"}}
DRIFT = 0.5  # nats between k8v4 and k4v4; a wrong block gives several
pytestmark = pytest.mark.skipif(STOCK, reason="stock SGLang has one format")


def test_cold_prompts_are_demoted_and_still_hit(floor, rng):
    """A prompt is demoted by later ones, still hits all of its tokens, and gives nearly the same log-probabilities. A
    prompt that named its format gives exactly the same."""
    client, batch = floor.client, [tokens(rng, 5 * BLOCK + 9) for _ in range(2)]
    before = []
    for prompt, sampling in zip(batch, ({}, NAMED)):
        client.generate(prompt, 2, sampling=sampling)
        before.append(client.generate(prompt, 12, top=3, sampling=sampling))
    begun = client.when_idle()
    assert begun["blocks_by_format"]["k8v4"] >= 10
    filled = begun["demoted_blocks"], begun["evicted_blocks"]
    while client.when_idle()["demoted_blocks"] < filled[0] + 20:
        client.generate_many([tokens(rng, 4 * BLOCK + 5) for _ in range(3)], 2, parallel=2)
    stats = client.when_idle()
    assert stats["evicted_blocks"] == filled[1], "a block was dropped while others could shrink"
    assert stats["blocks_by_format"]["k4v4"] >= 20
    for prompt, sampling, old in zip(batch, ({}, NAMED), before):
        new = client.generate(prompt, 12, top=3, sampling=sampling)
        assert new.cached_tokens == border(len(prompt))
        comparison = match(old, new)
        if sampling:
            assert comparison.same and comparison.drift < 1e-3, comparison.to_dict()
        else:
            assert 0 < comparison.drift < DRIFT, comparison.to_dict()


def test_levels_do_not_share_blocks_and_floor_format_is_refused(floor, rng):
    prompt = tokens(rng, 2 * BLOCK + 3)
    assert [floor.client.generate(prompt, 2, sampling=x).cached_tokens for x in ({}, NAMED, LOSSLESS)] == [0, 0, 0]
    with pytest.raises(RequestRefused, match="k8v4"):
        floor.client.generate(prompt, 2, sampling={"custom_params": {"kvc": "k4v4"}})
