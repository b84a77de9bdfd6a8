"""Prefills in SGLang's breakable CUDA graphs, whose pieces `graphs_on_cpu` runs on a CPU, compared with prefills
without graphs.

Answers are equal up to the rounding of products of more rows. On CPUs with AVX-512 those of a single request are equal
bit for bit.
"""

from __future__ import annotations

import itertools
import re

import pytest

from bench import prompts
from bench.compare import match

from .conftest import BLOCK, DRIFT, TIE, tokens

pytestmark = pytest.mark.cpu_only  # the tests read what the stand-in for graphs writes to the log

FREE = itertools.count()


def padded(server) -> list[tuple[int, int]]:
    """The number of new tokens of each prefill that went through a graph, and its padded size."""
    prefills = re.findall(r"prefill of (\d+) tokens as (\d+)", server.log.read_text(errors="replace"))
    return [(int(n), int(size)) for n, size in prefills]


@pytest.fixture(scope="module")
def text(servers):
    """Token ids of ordinary text, about which a model is less uncertain than about random ids."""
    from bench.common import demo_model

    tok = prompts.tokenizer(demo_model())
    return lambda n, start=0: prompts.cut(tok, prompts.chapter("types"), n, start=start)


def assert_same(a, b):
    comparison = match(a, b)
    assert (comparison.same or comparison.gap <= TIE) and comparison.drift < DRIFT, comparison.to_dict()


def without(server, prompt: list[int], n: int, **options):
    before = padded(server)
    answer = server.client.generate(prompt, n, rid=f"without-{next(FREE)}", **options)
    assert padded(server) == before
    return answer


@pytest.mark.parametrize("new", [3, 20, 37, 64])
def test_prefix_hit_in_graph_matches_eager(graphs, text, new):
    prompt = text(3 * BLOCK + new)
    first = without(graphs, prompt, 12, top=5)
    plain = without(graphs, prompt, 12, top=5)
    before = len(padded(graphs))
    hit = graphs.client.generate(prompt, 12, top=5)
    cached = (len(prompt) - 1) // BLOCK * BLOCK
    assert (first.cached_tokens, plain.cached_tokens, hit.cached_tokens) == (0, cached, cached)
    (n, size), = padded(graphs)[before:]  # fmt: skip
    assert n == len(prompt) - cached < size or new == 64
    assert_same(plain, hit)


@pytest.mark.parametrize("length", [40, 100, 3 * BLOCK - 7])
def test_chunked_prompt_and_its_cached_blocks_match_eager(graphs, text, length):
    """Compares log-probabilities of the prompt's own tokens chunk by chunk, then a run without a graph over its cached
    blocks."""
    prompt = text(length)
    plain, over_plain = (without(graphs, prompt, 4, input_from=0, top=5) for _ in range(2))
    graphs.client.flush()
    before = len(padded(graphs))
    graphed = graphs.client.generate(prompt, 4, input_from=0, top=5)
    assert sum(n for n, _ in padded(graphs)[before:]) == length
    over = without(graphs, prompt, 4, input_from=0, top=5)
    for a, b in ((plain, graphed), (over_plain, over)):
        assert_same(a, b)
        assert a.input_logprobs == pytest.approx(b.input_logprobs, abs=DRIFT)
    assert len(graphed.input_logprobs) == length - 1


def test_batched_prefill_answers_as_alone(graphs, text, rng):
    """Several requests share one padded prefill, some after hits, while others decode; each answers as if alone."""
    trunk = text(2 * BLOCK)
    batch = [trunk + text(n, start=300 + n) for n in (5, 9, 14)] + [text(n, start=400 + n) for n in (27, 31)]
    alone = [without(graphs, p, 10, top=5) for p in batch]
    for _ in range(5):  # on a busy machine requests may arrive one by one
        graphs.client.flush()
        graphs.client.generate(trunk + tokens(rng, 1), 1)
        before = len(padded(graphs))
        together = graphs.client.generate_many(batch, 10, parallel=len(batch), top=5)
        assert [a.cached_tokens for a in together] == [2 * BLOCK] * 3 + [0] * 2
        for a, b in zip(alone, together):
            assert_same(a, b)
        new = {len(p) - a.cached_tokens for p, a in zip(batch, together)}
        if any(n not in new for n, _ in padded(graphs)[before:]):
            return
    raise AssertionError("no two requests shared a prefill")
