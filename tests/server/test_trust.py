"""One client's tokens affect what another reads of a shared prefix, and `--kvc-trust` limits this to one salt."""

from __future__ import annotations

import pytest

from .conftest import BLOCK, STOCK, tokens

pytestmark = pytest.mark.skipif(STOCK, reason="stock SGLang keeps what a token is, not what looked at it")


@pytest.mark.parametrize("field", ["cache_salt", "extra_key"])
@pytest.mark.parametrize(
    "first, second, crosses",
    [("A", "A", True), ("A", "B", False), ("A", None, False), (None, None, False)],
    ids=["one salt", "two salts", "a salt and none", "no salts"],
)
def test_evidence_stays_within_salt(salted, rng, first, second, crosses, field):
    """The same request runs after different requests with the same prefix. Blocks are packed by the attention of later
    tokens of the first request, so these tokens affect the second answer where both share the prefix."""
    client, prefix = salted.client, tokens(rng, 4 * BLOCK)
    prompt, answers = prefix + tokens(rng, 20), []
    for _ in range(2):
        client.flush()
        client.generate(prefix + tokens(rng, 3 * BLOCK), 1, **{field: first})
        client.when_idle()
        answers.append(client.generate(prompt, 8, logprobs=True, **{field: second}))
        assert answers[-1].cached_tokens == (4 * BLOCK if crosses else 0)
    assert (answers[0].logprobs != answers[1].logprobs) == crosses
