"""Decode steps that join the chunks of prompts (`--enable-mixed-chunk`).

SGLang mixes only where no request wants log-probabilities, so answers are compared with those of the same prompts
alone, which have them.
"""

from __future__ import annotations

import math

from bench import prompts
from bench.common import demo_model

from .conftest import BLOCK, STOCK, tokens
from .test_packed_lifecycle import Stream

CHUNK = 2 * BLOCK
TIE = 0.2  # nats between candidates where two runs in batches of other shapes part
ANSWER = BLOCK + 8  # tokens: a block of the answer is packed while prompts come in


def test_a_running_answer_goes_on_while_a_prompt_is_prefilled(mixed, rng):
    """Without mixing, SGLang prefills all chunks first."""
    chunks, length = 4, 80
    stream = Stream(mixed, tokens(rng, 30), length).wait()
    before = len(stream.events)
    answer = mixed.client.generate(tokens(rng, chunks * CHUNK), 1)
    assert len(answer.ids) == 1
    assert len(stream.events) - before >= chunks - 2
    stream.join(120)
    assert stream.finish == "length" and stream.events[-1]["meta_info"]["completion_tokens"] == length


def test_answers_are_those_of_the_prompts_alone(mixed):
    tok = prompts.tokenizer(demo_model())
    asked = [prompts.cut(tok, prompts.prose(), 70 + 80 * i, start=1500 * i) for i in range(2)]
    alone = [mixed.client.generate(p, ANSWER, top=5) for p in asked]
    mixed.client.flush()
    together = mixed.client.generate_many(asked, ANSWER, parallel=2)
    for one, other in zip(alone, together):
        assert len(other.ids) == ANSWER
        parted = next((i for i, (x, y) in enumerate(zip(one.ids, other.ids)) if x != y), None)
        if parted is not None:
            best = one.top[parted]
            assert best[one.ids[parted]] - best.get(other.ids[parted], -math.inf) <= TIE, parted
    if not STOCK:
        stats = mixed.client.when_idle()
        assert stats["packed_tokens"] > 0
