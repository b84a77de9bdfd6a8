"""Prefills in SGLang's breakable CUDA graphs, whose pieces `graphs_on_cpu` runs on a CPU, beside those without.

The rows of a product do not depend on padding behind them here, so that answers are equal bit for bit.
"""

from __future__ import annotations

import itertools
import re

import pytest

from .conftest import BLOCK, STOCK, tokens

pytestmark = pytest.mark.skipif(STOCK, reason="the CPU's attention of stock SGLang takes no padded batch")
FREE = itertools.count()
TOLERANCE = 0.2  # nats, where other requests are in the batch: the CPU adds products of more rows in another order


def padded(server) -> list[tuple[int, int]]:
    """New tokens of each prefill that went through a graph, and to how many they were padded."""
    found = re.findall(r"prefill of (\d+) tokens as (\d+)", server.log.read_text(errors="replace"))
    return [(int(n), int(size)) for n, size in found]


def without(server, prompt: list[int], n: int, **options):
    before = padded(server)
    answer = server.client.generate(prompt, n, rid=f"without-{next(FREE)}", **options)
    assert padded(server) == before
    return answer


@pytest.mark.parametrize("new", [3, 20, 37, 64])
def test_a_hit(graphs, rng, new):
    prompt = tokens(rng, 3 * BLOCK + new)
    first = without(graphs, prompt, 12, logprobs=True)
    plain = without(graphs, prompt, 12, logprobs=True)
    before = len(padded(graphs))
    hit = graphs.client.generate(prompt, 12, logprobs=True)
    cached = (len(prompt) - 1) // BLOCK * BLOCK
    assert (first.cached_tokens, plain.cached_tokens, hit.cached_tokens) == (0, cached, cached)
    (n, size), = padded(graphs)[before:]  # fmt: skip
    assert n == len(prompt) - cached < size or new == 64
    assert (plain.ids, plain.logprobs) == (hit.ids, hit.logprobs)


@pytest.mark.parametrize("length", [40, 100, 3 * BLOCK - 7])
def test_a_prompt_and_what_it_leaves_in_the_cache(graphs, rng, length):
    """Chunk by chunk, with the log-probabilities of its own tokens; then without a graph over the blocks it left."""
    prompt = tokens(rng, length)
    plain, over_plain = (without(graphs, prompt, 4, input_from=0) for _ in range(2))
    graphs.client.flush()
    before = len(padded(graphs))
    asked = graphs.client.generate(prompt, 4, input_from=0)
    assert sum(n for n, _ in padded(graphs)[before:]) == length
    over = without(graphs, prompt, 4, input_from=0)
    for a, b in ((plain, asked), (over_plain, over)):
        assert (a.ids, a.logprobs, a.input_logprobs) == (b.ids, b.logprobs, b.input_logprobs)
    assert len(asked.input_logprobs) == length - 1


def test_requests_that_share_a_prefill(graphs, rng):
    """Several requests in one padded prefill, some behind hits, while others decode: each as if it were alone."""
    trunk = tokens(rng, 2 * BLOCK)
    prompts = [trunk + tokens(rng, n) for n in (5, 9, 14)] + [tokens(rng, n) for n in (7, 11)]
    alone = [without(graphs, p, 10, logprobs=True) for p in prompts]
    graphs.client.flush()
    graphs.client.generate(trunk + tokens(rng, 1), 1)
    before = len(padded(graphs))
    together = graphs.client.generate_many(prompts, 10, parallel=len(prompts), logprobs=True)
    assert [a.cached_tokens for a in together] == [2 * BLOCK] * 3 + [0] * 2
    new = {len(p) - a.cached_tokens for p, a in zip(prompts, together)}
    assert any(n not in new for n, _ in padded(graphs)[before:])  # at least two at a time
    for a, b in zip(alone, together):
        assert a.ids == b.ids and a.logprobs == pytest.approx(b.logprobs, abs=TOLERANCE)
