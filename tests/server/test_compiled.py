"""A model compiled by `--enable-torch-compile`, whose decode steps call attention from compiled code."""

from __future__ import annotations

import pytest

from bench import common

from .conftest import BLOCK, DRIFT, LOSSLESS, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not common.has_gpu(), reason="SGLang compiles decode steps of CUDA graphs"),
]


def test_compiled_decode_matches_prefill(compiled, rng):
    """Prefills are not compiled, so they give the reference for decode steps in batches of compiled and of other
    sizes."""
    prompts = [tokens(rng, n) for n in (30, 3 * BLOCK + 5, 2 * BLOCK, 90)]
    for parallel in (1, 2, 4):
        answers = compiled.client.generate_many(prompts, BLOCK + 8, parallel=parallel, logprobs=True, sampling=LOSSLESS)
        for prompt, answer in zip(prompts, answers):
            again = compiled.client.generate(
                [*prompt, *answer.ids], 1, input_from=len(prompt) - 1, sampling=LOSSLESS
            ).input_logprobs
            drift = [abs(a - b) for a, b in zip(answer.logprobs, again, strict=True)]
            assert max(drift) < DRIFT and sum(drift) / len(drift) < DRIFT / 4


def test_compiled_steps_read_packed_blocks(compiled, rng):
    prompt = tokens(rng, 4 * BLOCK + 3)
    compiled.client.generate(prompt, 8)
    first, second = (compiled.client.generate(prompt, 2 * BLOCK, logprobs=True) for _ in range(2))
    assert (first.cached_tokens, second.cached_tokens) == (4 * BLOCK, 4 * BLOCK)
    assert (first.ids, first.logprobs) == (second.ids, second.logprobs)
