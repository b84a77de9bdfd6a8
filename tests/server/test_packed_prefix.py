"""Prefix hits on a server with packed blocks: exactly at block borders, immediately, and only where allowed."""

from __future__ import annotations

import pytest

from bench import prompts
from bench.compare import match

from .conftest import BLOCK, STOCK, border, rows_alike, tokens

# Nats between the log-probabilities of one token of two runs, where one run computed a single row and the other
# computed it among others: the products round differently. Stock drifts by up to 0.08, with a gap of 0.03 where answers
# diverge; k4v4 drifts by 0.19 at any page size.
ROW_DRIFT, TIE = 0.4, 0.2
# The same where both computed several rows. It is 0 where products do not depend on the number of rows.
DRIFT = 0.01 if rows_alike() else ROW_DRIFT


@pytest.fixture(scope="module")
def tok(servers):
    from bench.common import demo_model

    return prompts.tokenizer(demo_model())


@pytest.mark.parametrize("n", [1, 63, 64, 65, 66, 128, 129, 130, 192, 193, 257, 400])
def test_repeated_prompt_hits_up_to_last_block_border(small, rng, n):
    """At least one token is always computed, because its logits are needed."""
    prompt = tokens(rng, n)
    assert small.client.generate(prompt, 2).cached_tokens == 0
    assert small.client.generate(prompt, 2).cached_tokens == border(n - 1)


@pytest.mark.parametrize(
    ("prompt_len", "answer_len"), [(60, 6), (64, 64), (100, 30), (130, 62), (130, 63), (190, 70)]
)
def test_answers_are_cached_too(small, rng, prompt_len, answer_len):
    """The last token of an answer was never fed back, so its K and V do not exist."""
    prompt = tokens(rng, prompt_len)
    answer = small.client.generate(prompt, answer_len)
    follow_up = prompt + answer.ids + tokens(rng, 3 * BLOCK)
    assert small.client.generate(follow_up, 2).cached_tokens == border(prompt_len + answer_len - 1)


@pytest.mark.parametrize("common", [64, 100, 191, 192])
def test_branches_hit_up_to_their_fork(small, rng, common):
    """A request that shares a part of a cached prompt hits that part, however the tree splits it into nodes."""
    trunk = tokens(rng, common)
    first = trunk + tokens(rng, 260)
    assert small.client.generate(first, 2).cached_tokens == 0
    for cut in (common, common + 70, common + 150):
        branch = first[:cut] + tokens(rng, 100)
        assert small.client.generate(branch, 2).cached_tokens == border(cut)
    assert small.client.generate(first, 2).cached_tokens == border(len(first) - 1)


def test_each_turn_hits_all_earlier_turns(small, rng):
    """In a dialogue of four turns of more than four blocks each, every turn hits all earlier turns."""
    history = tokens(rng, 5 * BLOCK + 17)
    expected = 0
    for _ in range(4):
        answer = small.client.generate(history, 20)
        assert answer.cached_tokens == expected
        history = history + answer.ids
        expected = border(len(history) - 1)
        history = history + tokens(rng, 4 * BLOCK + 5)
    assert expected > 16 * BLOCK


def test_requests_of_one_batch_share_prefix(small, rng):
    trunk = tokens(rng, 4 * BLOCK)
    small.client.generate(trunk + tokens(rng, 10), 2)
    answers = small.client.generate_many([trunk + tokens(rng, 40) for _ in range(6)], 12, parallel=6)
    assert [a.cached_tokens for a in answers] == [4 * BLOCK] * 6


def test_namespaces_do_not_share(small, rng):
    """`extra_key` separates LoRA adapters and tenants."""
    prompt = tokens(rng, 3 * BLOCK + 9)

    def hit(key):
        options = {} if key is None else {"extra_key": key}
        return small.client.generate(prompt, 2, **options).cached_tokens

    assert [hit(None), hit("a"), hit("b")] == [0, 0, 0]
    assert [hit(None), hit("a"), hit("b")] == [3 * BLOCK] * 3


def test_cache_salt_of_the_chat_api(packed):
    messages = [{"role": "user", "content": "Tell me about the sea. " * 40}]

    def hit(**options):
        usage = packed.client.chat(messages, max_tokens=2, **options)["usage"]
        return usage["prompt_tokens"], usage

    n, _ = hit(cache_salt="one")
    assert n > 3 * BLOCK
    ids = _cached(packed, messages, "one")
    assert ids == border(n - 1)
    assert _cached(packed, messages, "two") == 0


def _cached(server, messages, salt) -> int:
    """Cached tokens of a chat request, from the native fields that the OpenAI answer may carry."""
    body = server.client.chat(messages, max_tokens=2, cache_salt=salt, return_cached_tokens_details=True)
    details = body["usage"].get("prompt_tokens_details") or {}
    meta = body["choices"][0].get("sglext") or body.get("sglext") or {}
    if "cached_tokens" in details:
        return details["cached_tokens"]
    counts = meta.get("cached_tokens_details") or {}
    return sum(v for v in counts.values() if isinstance(v, int))


def test_flush_forgets_everything(small, rng):
    prompt = tokens(rng, 3 * BLOCK)
    small.client.generate(prompt, 4)
    small.client.flush()
    assert small.client.generate(prompt, 4).cached_tokens == 0


@pytest.mark.skipif(STOCK, reason="stock SGLang does not tell its pages")
def test_flush_returns_all_memory(small, rng):
    start = small.client.when_idle()
    assert start["tokens"] == 0
    small.client.generate_many([tokens(rng, 100 + 31 * i) for i in range(4)], 20)
    full = small.client.when_idle()
    assert full["pages_free"] < start["pages_free"]
    assert full["packed_tokens"] > 0 and full["tokens"] >= full["packed_tokens"]
    small.client.flush()
    end = small.client.when_idle()
    assert (end["pages_free"], end["tokens"], end["bytes"]) == (start["pages_free"], 0, start["bytes"])


@pytest.mark.skipif(STOCK, reason="stock SGLang keeps everything in bf16")
def test_blocks_are_packed_to_format_size(small, rng):
    """After the answer only an unfinished block stays uncompressed, and the bytes are those of the format."""
    small.client.generate(tokens(rng, 10 * BLOCK), 2)
    stats = small.client.when_idle()
    assert stats["packed_tokens"] == 10 * BLOCK
    assert stats["tokens"] == stats["packed_tokens"]
    assert stats["ratio_body"] > 3.0
    assert stats["occupancy"] >= 0.85


def test_warm_answers_equal_cold_ones(packed, tok):
    """Packed blocks depend only on the tokens before them, so a hit changes nothing."""
    for n in (BLOCK + 5, 4 * BLOCK, 7 * BLOCK + 40, 9 * BLOCK + 1):
        prompt = prompts.cut(tok, prompts.chapter("types"), n)
        packed.client.flush()
        cold = packed.client.generate(prompt, 12, top=3)
        warm = packed.client.generate(prompt, 12, top=3)
        assert (cold.cached_tokens, warm.cached_tokens) == (0, border(n - 1))
        comparison = match(cold, warm)
        if n - border(n - 1) > 1:
            assert comparison.same and comparison.drift < DRIFT, comparison.to_dict()
        else:
            assert (comparison.same or comparison.gap <= TIE) and comparison.drift < ROW_DRIFT, comparison.to_dict()


def test_answer_reused_as_prompt_hits_decoded_blocks(packed, tok):
    """A longer prompt hits blocks filled by decoding, and they agree with blocks filled by a prefill up to the rounding
    of the model's products; blocks of a prefill agree with themselves exactly."""
    prompt = prompts.cut(tok, prompts.chapter("assignment"), 3 * BLOCK + 10)
    answer = packed.client.generate(prompt, 2 * BLOCK, logprobs=True)
    longer = [*prompt, *answer.ids, *prompts.cut(tok, prompts.chapter("assignment"), 20, start=600)]
    warm = packed.client.generate(longer, 16, top=3)
    assert warm.cached_tokens == 5 * BLOCK
    packed.client.flush()
    cold = packed.client.generate(longer, 16, top=3)
    assert cold.cached_tokens == 0
    comparison = match(cold, warm)
    assert (comparison.same or comparison.gap <= TIE) and comparison.drift < ROW_DRIFT, comparison.to_dict()
    again = packed.client.generate(longer, 16, top=3)
    assert again.cached_tokens == 5 * BLOCK
    comparison = match(cold, again)
    assert comparison.same and comparison.drift < DRIFT, comparison.to_dict()
