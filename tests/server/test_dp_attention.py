"""DP attention: two ranks with separate requests, pools and trees, which share the other layers of every step."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from .conftest import BLOCK, LOSSLESS, ROWS, STOCK, TWO_RANKS, deviation, tokens
from .test_ranks import PACKED, ROUNDING

pytestmark = [
    pytest.mark.skipif(STOCK, reason="SGLang's own backend for CPUs does not pad batches"),
    TWO_RANKS,
]


def test_answers_do_not_depend_on_other_rank(dp, rng):
    """Prompts arrive while others decode, so that ranks prefill, decode, idle and are padded to each other."""
    off_by = deviation(dp.model)
    requests = [(tokens(rng, rng.randint(BLOCK + 2, 6 * BLOCK)), rng.randint(1, 60), i % 3 == 0) for i in range(9)]

    def ask(prompt: list[int], n: int, packed: bool):
        sampling = None if packed else LOSSLESS
        return dp.client.generate(prompt, n, logprobs=True, input_from=BLOCK - 1, sampling=sampling)

    with ThreadPoolExecutor(ROWS) as pool:
        answers = list(pool.map(lambda request: ask(*request), requests))
    for (prompt, n, packed), answer in zip(requests, answers):
        assert len(answer.ids) == n
        whole_answer = SimpleNamespace(input_logprobs=[*answer.input_logprobs, *answer.logprobs])
        assert off_by(whole_answer, prompt + answer.ids) < (PACKED if packed else ROUNDING)
    dp.client.when_idle()


def test_each_rank_has_its_own_cache(dp, rng):
    prompts = [tokens(rng, 4 * BLOCK + 9) for _ in range(3)]
    first = dp.client.generate_many(prompts, 8, parallel=3)
    assert not any(a.cached_tokens for a in first)
    for _ in range(2):  # requests go to the ranks in turn
        again = [dp.client.generate(p, 8) for p in prompts]
        assert all(a.cached_tokens in (0, 4 * BLOCK) for a in again)
    assert all(dp.client.generate(p, 8).cached_tokens == 4 * BLOCK for p in prompts)
    stats = [state["kvc"]["stats"] for state in dp.client.server_info()["internal_states"]]
    assert len(stats) == 2 and all(s["packed_tokens"] for s in stats)
