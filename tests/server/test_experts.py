"""Routed experts of a mixture-of-experts model. SGLang keeps them by slot while the blocks of the slots are packed."""

from __future__ import annotations

import numpy as np
import pytest
import requests
import torch

from .conftest import BLOCK, STOCK, tokens

LAYERS, TAKEN = 3, 2
NEW = BLOCK + 8  # blocks of the answer are also packed
ALIKE = 0.97  # share of a token's experts that bf16 rounding leaves the same

pytestmark = pytest.mark.skipif(STOCK, reason="stock SGLang needs a GPU for it")


@pytest.fixture(scope="module")
def routed(servers):
    """The experts that transformers chooses for each token, as 0/1 rows `[tokens * LAYERS, 8]`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(servers.get("experts").model, dtype=torch.bfloat16)

    def experts(ids):
        with torch.no_grad():
            logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
        top = torch.stack([x.float().topk(TAKEN).indices for x in logits], 1)
        return one_hot(top.numpy())

    return experts


def one_hot(experts: np.ndarray) -> np.ndarray:
    """`[tokens, LAYERS, TAKEN]` -> `[tokens, LAYERS, 8]`."""
    return np.eye(8)[experts].sum(2)


def ask(server, prompt, new, **options):
    """The answer, and its experts `[tokens - 1, LAYERS, 8]`: the last token was never an input."""
    from sglang.srt.state_capturer.routed_experts import extract_routed_experts_from_meta_info

    answer = server.client.generate(prompt, new, return_routed_experts=True, **options)
    flat = extract_routed_experts_from_meta_info({"meta_info": answer.meta})
    return answer, one_hot(flat.reshape(-1, LAYERS, TAKEN))


def alike(a: np.ndarray, b: np.ndarray) -> float:
    assert a.shape == b.shape
    return float((a * b).sum() / (TAKEN * a.shape[0] * a.shape[1]))


def test_experts_match_transformers(experts, routed, rng):
    """Checked cold in three chunks, from the cache, and over a decoded answer. Requests are lossless, because packed
    keys change later choices."""
    prompt = tokens(rng, 5 * BLOCK + 9)
    lossless = {"sampling": {"custom_params": {"kvc": "lossless"}}}
    for cached in (0, 5 * BLOCK):
        answer, got = ask(experts, prompt, NEW, **lossless)
        assert answer.cached_tokens == cached
        assert alike(got, routed([*prompt, *answer.ids[:-1]])) > ALIKE
    other = routed([*tokens(rng, len(prompt)), *answer.ids[:-1]])
    assert alike(got, other) < 0.8, "the model's choices do not depend on the text"


def test_packed_blocks_keep_experts_of_their_slots(experts, rng):
    """Prompts exceed the uncompressed capacity, so that slots above SGLang's own count are used. A hit returns the
    experts that the prompt that wrote the block returned."""
    prompts = [tokens(rng, 3 * BLOCK) for _ in range(16)]
    cold = [ask(experts, prompt, 1) for prompt in prompts]
    stats = experts.client.when_idle()
    assert stats["tokens"] > experts.client.server_info()["max_total_num_tokens"] and stats["evicted_blocks"] == 0
    for prompt, (_, before) in zip(prompts, cold):
        answer, again = ask(experts, prompt, 1)
        assert answer.cached_tokens == 2 * BLOCK
        assert np.array_equal(again[: 2 * BLOCK], before[: 2 * BLOCK])


def test_prompt_that_gives_up_slots_cannot_return_experts(experts, rng):
    one_shot = {"sampling": {"custom_params": {"kvc": "one-shot:8x"}}}
    prompt = tokens(rng, 4 * BLOCK)
    body = experts.client.payload(prompt, 4, return_routed_experts=True, **one_shot)
    refused = requests.post(experts.url + "/generate", json=body, timeout=600)
    assert refused.status_code == 400 and "by slot" in refused.text
    assert len(experts.client.generate(prompt, 4, **one_shot).ids) == 4
