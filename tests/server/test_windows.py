"""A served model with sliding windows: compared with transformers without compression, and with itself.

Its random weights produce no text, but log-probabilities that depend on which tokens a layer sees. Short prompts go
through SGLang's runner of prefill graphs, which pads them and passes Gemma 3's queries with their padding.
"""

from __future__ import annotations

import pytest
import torch

from .conftest import BLOCK, LOSSLESS, STOCK, border, tokens

WINDOW = 100  # between one block and two
# Lengths around the window, around its blocks, within a chunk and over several chunks.
LENGTHS = [30, 99, 100, 101, 128, 300, 700]
UNCOMPRESSED = {} if STOCK else LOSSLESS
DRIFT = 0.06  # nats between transformers and a server, both in bf16, on average over tokens


@pytest.fixture(scope="module")
def reference(servers):
    """Log-probabilities of the tokens ids[start:], by transformers; `window` overrides the model's."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(servers.model("windowed"), dtype=torch.bfloat16)
    model.set_attn_implementation("eager")

    def logprobs(ids, start, window=WINDOW):
        for layer in model.model.layers:
            layer.self_attn.sliding_window = window if layer.self_attn.is_sliding else None
        model.config.sliding_window = window
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, start - 1 : -1].float()
        return logits.log_softmax(-1).gather(1, torch.tensor(ids[start:])[:, None])[:, 0]

    return logprobs


def drift(answer, prompt, reference, **options):
    """The mean difference of the generated tokens' log-probabilities."""
    return apart(answer.logprobs, reference([*prompt, *answer.ids], len(prompt), **options))


def apart(a, b):
    return float((torch.tensor(a) - torch.as_tensor(b)).abs().mean())


@pytest.mark.parametrize("length", LENGTHS)
def test_logprobs_match_transformers(windowed, reference, rng, length):
    """Checked cold, from the cache, and while decoding past the window's border."""
    prompt = tokens(rng, length)
    cold = windowed.client.generate(prompt, 40, logprobs=True, sampling=UNCOMPRESSED, input_from=1)
    assert drift(cold, prompt, reference) < DRIFT
    seen = cold.input_logprobs[-60:]
    assert apart(seen, reference(prompt, length - len(seen))) < DRIFT
    warm = windowed.client.generate(prompt, 40, logprobs=True, sampling=UNCOMPRESSED)
    assert warm.cached_tokens >= border(length - 1)
    assert drift(warm, prompt, reference) < DRIFT
    # A prompt appended to the generated tokens.
    longer = [*prompt, *cold.ids, *tokens(rng, 17)]
    after = windowed.client.generate(longer, 8, logprobs=True, sampling=UNCOMPRESSED)
    assert after.cached_tokens >= border(length + 40 - 1)
    assert drift(after, longer, reference) < DRIFT


def test_wrong_window_shifts_logprobs(windowed, reference, rng):
    """The tests above would fail for a server that sees one token more or fewer, or all of them."""
    prompt = tokens(rng, 300)
    answer = windowed.client.generate(prompt, 40, logprobs=True, sampling=UNCOMPRESSED)
    right = drift(answer, prompt, reference)
    assert all(drift(answer, prompt, reference, window=n) > 2 * right for n in (WINDOW - 1, WINDOW + 1, 10_000))


@pytest.mark.cpu_only  # only the stand-in for CUDA graphs logs the padding
def test_short_prompts_are_padded(windowed, rng):
    windowed.client.generate(tokens(rng, 60), 1)
    assert "prefill of 60 tokens as 64" in windowed.log.read_text()


def test_concurrent_requests_of_all_lengths_match_transformers(windowed, reference, rng):
    batch = [tokens(rng, n) for n in LENGTHS]
    for prompt, answer in zip(batch, windowed.client.generate_many(batch, 30, logprobs=True, sampling=UNCOMPRESSED)):
        assert drift(answer, prompt, reference) < DRIFT


@pytest.mark.skipif(STOCK, reason="stock SGLang packs nothing")
def test_packed_warm_answers_equal_cold_ones(windowed, reference, rng):
    """Warm answers equal cold ones, and compression costs little."""
    for length in (2 * BLOCK + 1, 300, 700):
        prompt = tokens(rng, length)
        cold = windowed.client.generate(prompt, 12, logprobs=True)
        assert windowed.client.when_idle()["packed_tokens"] >= border(length)
        warm = windowed.client.generate(prompt, 12, logprobs=True)
        assert (cold.cached_tokens, warm.cached_tokens) == (0, border(length - 1))
        assert warm.ids == cold.ids
        assert apart(cold.logprobs, warm.logprobs) < DRIFT
        assert drift(cold, prompt, reference) < 1.0
