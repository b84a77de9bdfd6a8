"""Decode steps that join the chunks of prompts (`--enable-mixed-chunk`).

SGLang mixes only if no request asks for log-probabilities, so an answer is compared with that of the same prompt alone,
which has them.
"""

from __future__ import annotations

import math

from .conftest import BLOCK, STOCK, tokens
from .test_packed_lifecycle import Stream

CHUNK, CHUNKS = 2 * BLOCK, 4
TIE = 0.2  # nats between candidates where two runs in batches of different shapes diverge
ANSWER = BLOCK + 8  # tokens: a block of the answer is packed while the prompt comes in


def test_answer_continues_while_prompt_is_prefilled(mixed, rng):
    """The answer equals that of the prompt alone. Without mixing, SGLang would prefill all chunks first."""
    prompt = tokens(rng, 70)
    alone = mixed.client.generate(prompt, ANSWER, top=5)
    mixed.client.flush()
    stream = Stream(mixed, prompt, ANSWER).wait()
    before = len(stream.events)
    assert len(mixed.client.generate(tokens(rng, CHUNKS * CHUNK), 1).ids) == 1
    assert len(stream.events) - before >= CHUNKS - 2
    stream.join(120)
    ids = stream.events[-1]["output_ids"]
    assert stream.finish == "length" and len(ids) == ANSWER
    parted = next((i for i, (x, y) in enumerate(zip(alone.ids, ids)) if x != y), None)
    if parted is not None:
        best = alone.top[parted]
        assert best[alone.ids[parted]] - best.get(ids[parted], -math.inf) <= TIE, parted
    if not STOCK:
        assert mixed.client.when_idle()["packed_tokens"] > 0
