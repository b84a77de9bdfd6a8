"""Requests that ask for exact blocks on a server that packs and offers nothing else."""

from __future__ import annotations

import pytest

from bench import prompts
from bench.client import RequestRefused
from bench.common import demo_model

from .conftest import BLOCK, EXACT, LEVEL, LOSSLESS, STOCK, border, tokens

pytestmark = pytest.mark.skipif(STOCK, reason="stock SGLang has no levels")


def test_lossless_blocks_are_kept_and_shared_only_with_lossless(small, rng):
    prompt = tokens(rng, 4 * BLOCK + 7)
    first = small.client.generate(prompt, 2 * BLOCK, sampling=LOSSLESS)
    stats = small.client.when_idle()
    assert stats["packed_tokens"] == 0 and stats["tokens"] == 6 * BLOCK
    again = small.client.generate(prompt, 4, sampling=LOSSLESS)
    assert again.cached_tokens == border(len(prompt) - 1)
    assert again.ids == first.ids[:4]
    assert small.client.generate(prompt, 4).cached_tokens == 0
    assert small.client.when_idle()["packed_tokens"] == 4 * BLOCK


def test_lossless_logprobs_match_transformers(packed, off_by):
    """The log-probabilities are compared with those of another implementation, without relying on the server's own
    statistics."""
    prompt = prompts.cut(prompts.tokenizer(demo_model()), prompts.prose(), 7 * BLOCK + 10)
    ask = {"input_from": BLOCK - 1}
    assert off_by(packed.client.generate(prompt, 1, sampling=LOSSLESS, **ask), prompt) < EXACT
    assert off_by(packed.client.generate(prompt, 1, **ask), prompt) > EXACT, "packed blocks would not be noticed"


@pytest.mark.parametrize("level", ["best", 3, ["lossless"], LEVEL])
def test_unknown_level_is_refused(packed, rng, level):
    with pytest.raises(RequestRefused) as refused:
        packed.client.generate(tokens(rng, 20), 4, sampling={"custom_params": {"kvc": level}})
    assert refused.value.status == 400
    assert "not a level of the compressed cache" in str(refused.value)
    assert len(packed.client.generate(tokens(rng, 20), 4).ids) == 4
