"""A server without a prefix cache: every request owns its blocks, and returns them when it ends."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from .conftest import BLOCK, STOCK, tokens


def arrivals(server, prompt: list[int], new_tokens: int) -> list[float]:
    """The time at which each token of the answer arrives."""
    body = server.client.payload(prompt, new_tokens, ignore_eos=False, sampling={"min_new_tokens": new_tokens})
    with requests.post(server.url + "/generate", json=body | {"stream": True}, stream=True, timeout=600) as answer:
        parts = (line[6:] for line in answer.iter_lines() if line.startswith(b"data: {"))
        return [time.monotonic() for part in parts if json.loads(part)["output_ids"]]


def test_no_block_is_shared_and_all_are_returned(unshared, rng):
    trunk = tokens(rng, 3 * BLOCK)
    before = unshared.client.when_idle()
    answers = unshared.client.generate_many(
        [trunk + tokens(rng, 20 * i + 1) for i in range(6)], 24, parallel=4
    )
    assert [a.cached_tokens for a in answers] == [0] * 6
    assert [len(a.ids) for a in answers] == [24] * 6
    after = unshared.client.when_idle()
    if not STOCK:
        assert (after["pages_free"], after["tokens"]) == (before["pages_free"], 0)


@pytest.mark.skipif(STOCK, reason="stock SGLang keeps everything in bf16")
def test_long_answer_is_packed_while_it_grows(unshared, rng):
    """Blocks that the window has passed are packed during decode, before any request ends."""
    before = unshared.client.when_idle()["compactions"]
    unshared.client.generate(tokens(rng, 2 * BLOCK), 3 * BLOCK)
    assert unshared.client.when_idle()["compactions"] - before >= 3


@pytest.mark.skipif(STOCK, reason="stock SGLang's memory does not grow back while requests run")
def test_waiting_prompt_is_admitted_after_earlier_ones_are_packed(unshared, rng):
    """Three prompts of four tenths of the memory each: two fit while uncompressed, all three when packed.

    SGLang rechecks a full batch only when a request ends; the third prompt must not wait that long.
    """
    length = 42 * unshared.client.server_info()["max_total_num_tokens"] // 100
    prompts = [tokens(rng, length) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        runs = list(pool.map(lambda prompt: arrivals(unshared, prompt, 2 * BLOCK), prompts))
    last_in, first_out = max(times[0] for times in runs), min(times[-1] for times in runs)
    assert last_in < first_out


def test_pd_role_cannot_be_switched_without_disaggregation(unshared):
    """`--enable-pd-role-switch` has no effect on a server that is not disaggregated."""
    answer = requests.post(unshared.url + "/pd_role_switch", json={"new_role": "decode"}, timeout=60)
    assert not answer.json()["success"] and "not running in PD" in answer.text
