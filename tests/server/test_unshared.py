"""A server without a prefix cache: every request owns its blocks, and returns them when it ends."""

from __future__ import annotations

import pytest

from .conftest import BLOCK, STOCK, tokens


def test_nothing_is_shared_and_all_is_returned(unshared, rng):
    trunk = tokens(rng, 3 * BLOCK)
    before = unshared.client.when_idle()
    answers = unshared.client.generate_many(
        [trunk + tokens(rng, 20 * i + 1) for i in range(6)], 24, parallel=4
    )
    assert [a.cached_tokens for a in answers] == [0] * 6
    assert [len(a.ids) for a in answers] == [24] * 6
    after = unshared.client.when_idle()
    if not STOCK:
        assert (after["pages_free"], after["tokens"]) == (before["pages_free"], 0)


@pytest.mark.skipif(STOCK, reason="stock SGLang keeps everything in bf16")
def test_long_answer_is_packed_while_it_grows(unshared, rng):
    """Blocks behind the window are packed during decode, before any request ends."""
    before = unshared.client.when_idle()["compactions"]
    unshared.client.generate(tokens(rng, 2 * BLOCK), 3 * BLOCK)
    assert unshared.client.when_idle()["compactions"] - before >= 3
