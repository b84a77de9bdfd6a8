"""Requests that keep a budget of their whole prompt, alongside others on a server with 4-bit blocks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from bench import prompts
from bench.client import RequestRefused
from bench.common import demo_model
from bench.compare import match

from .conftest import BLOCK, DRIFT, STOCK, TIE, tokens

pytestmark = pytest.mark.skipif(STOCK, reason="stock SGLang has no levels")
CODE = "7391"


def level(name: str) -> dict:
    return {"custom_params": {"kvc": name}}


def needle_prompt(tokens: int, text: str) -> list[int]:
    """A prompt of the `text`, cut to about `tokens` tokens with a needle, followed by the question."""
    tok = prompts.tokenizer(demo_model())
    filler = tok.decode(prompts.cut(tok, text, tokens))
    text = f"{filler[:1500]}\nThe secret code of the laboratory is {CODE}.\n{filler[1500:]}"
    ask = "What is the secret code of the laboratory?"
    return prompts.chat(tok, [{"role": "user", "content": f"{text}\n\n{ask}"}])


def ratios_while_running(client, prompt: list[int], **options) -> list[float]:
    """Compression of the packed blocks of a running one-shot prompt, read three times.

    The answer is long enough that it still runs then on a slow machine, and is aborted after that. The bytes of its
    own packed blocks, which are in k4v4, are subtracted.
    """
    client.generate(prompt, 1, sampling=level("k4v4"))
    answer_bytes = client.when_idle()["bytes_per_token_body"]
    client.flush()
    packed, ratios = len(prompt) // BLOCK * BLOCK, []
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.generate, prompt, 1000, rid="observed", **options)
        while len(ratios) < 3:
            stats = client.stats()
            assert not running.done(), "the request ended before it was read"
            if stats["packed_tokens"] >= packed:
                prompt_bytes = stats["packed_bytes"] - (stats["packed_tokens"] - packed) * answer_bytes
                ratios.append(stats["bf16_token_bytes"] * packed / prompt_bytes)
                assert stats["tokens"] >= stats["packed_tokens"]
        client.post("/abort_request", {"rid": "observed"}).raise_for_status()
        assert running.result().finish["type"] == "abort"
    return ratios


@pytest.fixture(scope="module")
def question():
    return needle_prompt(900, prompts.chapter("execmodel"))


@pytest.mark.parametrize("ratio", [8, 16])
def test_question_in_prompt_is_answered_from_small_cache(packed, question, ratio):
    client = packed.client
    answer = client.generate(question, 24, ignore_eos=False, sampling=level(f"one-shot:{ratio}x"))
    assert CODE in answer.text
    again = client.generate(question, 24, ignore_eos=False, sampling=level(f"one-shot:{ratio}x"))
    assert again.cached_tokens == 0 and again.ids == answer.ids


def test_memory_matches_budget_and_is_freed_at_end(packed, question):
    """The prompt of a running one-shot request has the requested ratio; when the request ends, all its memory is
    free."""
    client = packed.client
    client.flush()
    before = client.when_idle()
    ratios = ratios_while_running(client, question, sampling=level("one-shot:8x"))
    assert all(8 <= ratio < 10 for ratio in ratios), ratios
    after = client.when_idle()
    assert after["pages_free"] == before["pages_free"] and after["tokens"] == 0


def test_other_requests_are_unaffected(packed, question, rng):
    """A default request has the same log-probabilities as alone, and hits only its own cached prefix."""
    client, plain = packed.client, tokens(rng, 5 * BLOCK + 9)
    client.flush()
    alone = client.generate(plain, 16, top=3)
    client.flush()
    with ThreadPoolExecutor(3) as pool:
        budgets = [pool.submit(client.generate, plain, 16, sampling=level(f"one-shot:{x}")) for x in ("64x", "128")]
        beside = pool.submit(client.generate, plain, 16, top=3).result()
        assert all(len(b.result().ids) == 16 and b.result().cached_tokens == 0 for b in budgets)
    comparison = match(alone, beside)
    assert (comparison.same or comparison.gap <= TIE) and comparison.drift < DRIFT, comparison.to_dict()
    warm = client.generate(plain, 16, top=3)
    assert warm.cached_tokens == 5 * BLOCK
    comparison = match(alone, warm)
    assert (comparison.same or comparison.gap <= TIE) and comparison.drift < DRIFT, comparison.to_dict()


def test_budget_that_keeps_all_equals_default_format(packed, question):
    """A budget that the server's format meets drops no token; only the prefill differs, because it sees exact
    blocks."""
    client = packed.client
    client.flush()
    all_kept = client.generate(question, 12, top=3, sampling=level("one-shot:1x"))
    default = client.generate(question, 12, top=3)
    assert default.cached_tokens == 0
    comparison = match(all_kept, default)
    assert comparison.same or comparison.gap <= 1.0, comparison.to_dict()


@pytest.mark.parametrize("wrong", ["one-shot", "one-shot:0.5x", "one-shot:65x", "one-shot:0", "one-shot:much"])
def test_invalid_budget_is_refused(packed, rng, wrong):
    with pytest.raises(RequestRefused, match="one-shot") as refused:
        packed.client.generate(tokens(rng, 20), 4, sampling=level(wrong))
    assert refused.value.status == 400


def test_prompt_that_does_not_fit_uncompressed_is_answered(thinned):
    """Memory holds half of the uncompressed prompt. The needle lies in a segment that is only partly kept."""
    client, prompt = thinned.client, needle_prompt(1750, prompts.prose())
    before = client.when_idle()
    assert len(prompt) > 2 * client.server_info()["max_total_num_tokens"]
    answer = client.generate(prompt, 24, ignore_eos=False, sampling=level("one-shot:16x"))
    assert CODE in answer.text and answer.cached_tokens == 0 and answer.prompt_tokens == len(prompt)
    again = client.generate(prompt, 24, ignore_eos=False, sampling=level("one-shot:16x"))
    assert again.ids == answer.ids
    after = client.when_idle()
    assert after["pages_free"] == before["pages_free"] and after["tokens"] == 0


def test_longest_prompts_are_served_alongside_others(thinned, rng):
    client = thinned.client
    limits = client.server_info()["internal_states"][0]["kvc"]["longest_prompt"]
    uncompressed = client.server_info()["max_total_num_tokens"]
    assert limits["one-shot:16x"] > limits["default"] > 2 * uncompressed
    long = tokens(rng, limits["one-shot:16x"] - 20)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(client.generate, long, 20, sampling=level("one-shot:16x"))
        rest = [pool.submit(client.generate, tokens(rng, 3 * BLOCK + 5), 20) for _ in range(3)]
        assert len(first.result().ids) == 20 and all(len(x.result().ids) == 20 for x in rest)
    refused = f"at one-shot:16x.* up to {limits['one-shot:16x']} tokens"
    with pytest.raises(RequestRefused, match=refused):
        client.generate([*long, *long[:80]], 4, sampling=level("one-shot:16x"))
    with pytest.raises(RequestRefused, match="log-probabilities"):
        client.generate(long, 4, input_from=0, sampling=level("one-shot:16x"))
