"""Requests that ask for exact blocks, beside others, on a server that packs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from bench import prompts
from bench.client import RequestRefused
from bench.compare import match

from .conftest import BLOCK, LEVEL, STOCK, border, tokens

TIE = 0.2  # nats; products of other shapes round otherwise
LOSSLESS = {"custom_params": {"kvc": "lossless"}}
pytestmark = pytest.mark.skipif(STOCK, reason="stock SGLang has no levels")


def test_lossless_blocks_are_kept_and_shared_only_among_their_like(packed, rng):
    prompt = tokens(rng, 4 * BLOCK + 7)
    first = packed.client.generate(prompt, 2 * BLOCK, sampling=LOSSLESS)
    stats = packed.client.when_idle()
    assert stats["packed_tokens"] == 0 and stats["tokens"] == 6 * BLOCK
    again = packed.client.generate(prompt, 4, sampling=LOSSLESS)
    assert again.cached_tokens == border(len(prompt) - 1)
    assert again.ids == first.ids[:4]
    assert packed.client.generate(prompt, 4).cached_tokens == 0
    assert packed.client.when_idle()["packed_tokens"] == 4 * BLOCK


def test_lossless_and_packed_in_one_batch(packed, servers):
    """Each answers as it does alone."""
    from bench.common import demo_model

    tok = prompts.tokenizer(demo_model())
    asked = [prompts.cut(tok, prompts.prose(), 150 + 40 * i, start=3000 * i) for i in range(4)]
    levels = [LOSSLESS if i % 2 else {} for i in range(4)]
    alone = []
    for ids, level in zip(asked, levels):
        packed.client.flush()
        alone.append(packed.client.generate(ids, 12, top=3, sampling=level))
    packed.client.flush()
    with ThreadPoolExecutor(4) as pool:
        ask = lambda ids, level: packed.client.generate(ids, 12, top=3, sampling=level)  # noqa: E731
        together = list(pool.map(ask, asked, levels))
    for a, b in zip(alone, together):
        found = match(a, b)
        assert (found.same or found.gap <= TIE) and found.drift < TIE, found.to_dict()
    # The level matters: the same prompt at the other level gives other numbers.
    other = packed.client.generate(asked[1], 12, top=3)
    assert other.cached_tokens == 0 and other.logprobs != together[1].logprobs


def test_a_format_of_ones_own(packed, rng):
    """Blocks of a request at another level are stored as that says, and found again at that level alone."""
    mine = {"custom_params": {"kvc": LEVEL}}
    packed.client.flush()
    prompt = tokens(rng, 4 * BLOCK + 7)
    cold = packed.client.generate(prompt, 12, top=3, sampling=mine)
    stats = packed.client.when_idle()
    assert stats["blocks_by_rung"] == {"bf16": 0, "k4v4": 0, LEVEL: 4}
    warm = packed.client.generate(prompt, 12, top=3, sampling=mine)
    assert warm.cached_tokens == 4 * BLOCK
    found = match(cold, warm)
    assert found.same and found.drift < 1e-3, found.to_dict()
    # The name of the server's own format is what every request gets.
    packed.client.generate(prompt, 4, sampling={"custom_params": {"kvc": "k4v4"}})
    assert packed.client.generate(prompt, 4).cached_tokens == 4 * BLOCK
    assert packed.client.when_idle()["blocks_by_rung"] == {"bf16": 0, "k4v4": 4, LEVEL: 4}


@pytest.mark.parametrize("level", ["best", 3, ["lossless"]])
def test_unknown_level_is_refused(packed, rng, level):
    with pytest.raises(RequestRefused) as refused:
        packed.client.generate(tokens(rng, 20), 4, sampling={"custom_params": {"kvc": level}})
    assert refused.value.status == 400
    assert "not a level of the compressed cache" in str(refused.value)
    assert len(packed.client.generate(tokens(rng, 20), 4).ids) == 4
