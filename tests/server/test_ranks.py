"""Two tensor-parallel ranks: each keeps the pages of its own heads, and their schedulers must decide alike."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from bench.client import RequestRefused

from .conftest import BLOCK, LOSSLESS, ROWS, STOCK, TWO_RANKS, border, deviation, tokens

# Mean difference in nats between log-probabilities of the random model and those of transformers. Three prompts on one
# rank: 0.07 to 0.09 without compression, 0.66 to 0.74 with k4v4. On two ranks: 0.08 to 0.09, 0.67 to 0.75.
ROUNDING, PACKED = 0.12, 1.0

pytestmark = [
    pytest.mark.skipif(STOCK, reason="about the compressed cache of each rank"),
    TWO_RANKS,
]


def test_ranks_stay_in_step_when_counts_differ(ranks, rng):
    """Blocks take different numbers of pages on each rank. Requests exceed memory and are repeated: a rank that kept
    blocks evicted by the other would compute different tokens, and both would wait for each other."""
    new = BLOCK + 8  # one block of the answer is planned, too
    trunk = tokens(rng, 4 * BLOCK)
    prompts = [trunk[: BLOCK * rng.randint(0, 4)] + tokens(rng, rng.randint(10, 4 * BLOCK)) for _ in range(16)]
    requests = [p for _ in range(2) for p in rng.sample(prompts, len(prompts))]
    answers = ranks.client.generate_many(requests, new, parallel=ROWS)
    assert [len(a.ids) for a in answers] == [new] * len(requests)
    assert any(a.cached_tokens > len(trunk) for a in answers[len(prompts) :])
    stats = ranks.client.when_idle()
    assert stats["evicted_blocks"] > 0 and stats["compactions"] > stats["evicted_blocks"]
    assert stats["host_loaded_bytes"] > 0, "no prompt came back from host memory"


def test_ranks_expire_sessions_in_step(ranks, rng):
    """Requests exceed memory, and times to live end while others run. Ranks that evicted different blocks would wait
    for each other."""
    prompts = [tokens(rng, rng.randint(10, 6 * BLOCK)) for _ in range(10)]
    requests = [p for _ in range(2) for p in rng.sample(prompts, len(prompts))]
    options = [{"custom_params": {"kvc_ttl": rng.choice([0, 0.05, 0.3, 60]), "kvc_steps": 2}} for _ in requests]
    with ThreadPoolExecutor(ROWS) as pool:
        answers = list(pool.map(lambda p, o: ranks.client.generate(p, BLOCK, sampling=o), requests, options))
    assert [len(a.ids) for a in answers] == [BLOCK] * len(requests)
    assert ranks.client.when_idle()["evicted_blocks"] > 0


def test_expired_session_leaves_memory_first(ranks, rng):
    """Of two prompts the later one has no time to live. The other one is still in memory when it is on the host."""
    client = ranks.client
    kept, expired = tokens(rng, 3 * BLOCK + 5), tokens(rng, 8 * BLOCK + 5)  # more than a request evicts at once
    client.generate(kept, 2)
    client.generate(expired, 2, sampling={"custom_params": {"kvc_ttl": 0}})
    client.generate(tokens(rng, 9), BLOCK)  # enough passes to read the clock twice
    before = client.when_idle()
    for _ in range(100):
        if client.stats()["evicted_blocks"] > before["evicted_blocks"]:
            break
        client.generate(tokens(rng, BLOCK), 2)
    loaded = []
    for prompt in (kept, expired):
        assert client.generate(prompt, 2).cached_tokens == border(len(prompt))
        loaded.append(client.when_idle()["host_loaded_bytes"])
    assert before["host_loaded_bytes"] == loaded[0] < loaded[1]


def test_refused_hint_is_bad_request(ranks, rng):
    with pytest.raises(RequestRefused, match=r'kvc_ttl.*not a number from 0') as e:
        ranks.client.generate(tokens(rng, 9), 2, sampling={"custom_params": {"kvc_ttl": -1}})
    assert e.value.status == 400


def test_warm_prompt_is_answered_as_before(ranks, rng):
    prompt = tokens(rng, 5 * BLOCK + 9)
    cold = ranks.client.generate(prompt, 24)
    first, second = (ranks.client.generate(prompt, 24, logprobs=True) for _ in range(2))
    assert (cold.cached_tokens, first.cached_tokens, second.cached_tokens) == (0, 5 * BLOCK, 5 * BLOCK)
    assert (first.ids, first.logprobs) == (second.ids, second.logprobs)


def test_ranks_that_share_kv_head_each_keep_copy(replicated, rng):
    """Twice as many ranks as KV heads. Each keeps pages of one head and answers for its own query heads."""
    off_by, prompt = deviation(replicated.model), tokens(rng, 5 * BLOCK + 9)
    ask = {"input_from": BLOCK - 1}
    exact = replicated.client.generate(prompt, BLOCK, sampling=LOSSLESS, **ask)
    assert off_by(exact, prompt) < ROUNDING
    assert off_by(replicated.client.generate(prompt, 1, **ask), prompt) < PACKED
    stats = replicated.client.when_idle()
    assert stats["bf16_token_bytes"] == 2 * 3 * 1 * 64 * 2  # K and V of 3 layers and one head of 64
    assert stats["packed_tokens"] == 5 * BLOCK
    again = [replicated.client.generate(prompt, BLOCK, sampling=LOSSLESS) for _ in range(2)]
    assert [a.cached_tokens for a in again] == [5 * BLOCK] * 2
    assert again[0].ids == again[1].ids


def test_ranks_charge_one_shot_prompts_alike(replicated, rng):
    """Each rank chooses tokens by its own query heads, but the same number of pages. Requests exceed memory."""
    client, trunk = replicated.client, tokens(rng, 2 * BLOCK)
    client.flush()
    prompts = [trunk + tokens(rng, rng.randint(10, 4 * BLOCK)) for _ in range(8)]
    levels = ["one-shot:64x", "one-shot:6x", "one-shot:96", None]
    options = [{"custom_params": {"kvc": rng.choice(levels)}} for _ in prompts]
    with ThreadPoolExecutor(ROWS) as pool:
        answers = list(pool.map(lambda p, o: client.generate(p, BLOCK + 8, sampling=o), prompts, options))
    for answer, option in zip(answers, options):
        assert len(answer.ids) == BLOCK + 8
        assert option["custom_params"]["kvc"] is None or answer.cached_tokens == 0
