"""`--enable-memory-saver`: the KV memory is released between rollouts, and answers stay the same afterwards."""

from __future__ import annotations

import os
import subprocess

import pytest

from bench import common

from .conftest import BLOCK, STOCK, TIE, tokens

KV = {"tags": ["kv_cache"]}
POOL = 512 << 20  # bytes of the pool of the server "saver"


def on_gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(not common.has_gpu(), reason="needs a GPU")(test))


def release(server, body: dict | None = None) -> None:
    """Release memory once the scheduler is idle. A client has its answer before the scheduler drops the request, and
    SGLang's scheduler ends if a release comes in between."""
    server.client.when_idle()
    post(server, "/release_memory_occupation", body)


def post(server, path: str, body: dict | None = None) -> None:
    reply = server.client.post(path, body or {})
    assert reply.status_code == 200, reply.text


def gpu_memory() -> int:
    """Bytes in use on the server's GPU, by all processes."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    command = ["nvidia-smi", "-i", first, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.check_output(command, text=True).split()[0]) << 20


def check_same(again, before) -> None:
    """On the CPU the same prompt in the same batch gives the same bits."""
    assert len(again.ids) == len(before.ids)
    if not common.has_gpu():
        assert (again.ids, again.logprobs) == (before.ids, before.logprobs)
        return
    for i, (a, b) in enumerate(zip(again.ids, before.ids)):
        if a != b:
            assert abs(again.logprobs[i] - before.logprobs[i]) < TIE
            return


def test_answers_after_release_equal_fresh_server(saver, rng):
    """On the CPU a plug-in overwrites the memory instead of releasing it, and detects writes to it."""
    prompts = [tokens(rng, 4 * BLOCK + 9), tokens(rng, 2 * BLOCK + 20)]
    before = [saver.client.generate(p, 8, logprobs=True) for p in prompts]
    hits = [saver.client.generate(p, 8, logprobs=True) for p in prompts]
    assert all(a.cached_tokens for a in hits)
    for _ in range(2):
        release(saver, KV)
        if not STOCK:
            assert saver.client.when_idle()["tokens"] == 0  # statistics are measured without the memory
        post(saver, "/resume_memory_occupation", KV)
        again = [saver.client.generate(p, 8, logprobs=True) for p in prompts]
        assert not any(a.cached_tokens for a in again)
        for a, b in zip(again, before):
            check_same(a, b)
        for a, b in zip([saver.client.generate(p, 8, logprobs=True) for p in prompts], hits):
            check_same(a, b)


@on_gpu
def test_gpu_memory_drops_by_pool_size(saver, rng):
    saver.client.generate(tokens(rng, 3 * BLOCK), 16)
    before = gpu_memory()
    release(saver, KV)
    released = gpu_memory()
    post(saver, "/resume_memory_occupation", KV)
    assert before - released >= 0.95 * POOL
    assert gpu_memory() - released >= 0.95 * POOL
    saver.client.generate(tokens(rng, 3 * BLOCK), 16)


@on_gpu
def test_all_memory_is_released_and_weights_are_restored(saver, rng):
    """Without tags, weights and captured graphs are also released. A real rollout loads new weights before it
    continues."""
    prompt = tokens(rng, 3 * BLOCK + 5)
    before = saver.client.generate(prompt, 16, logprobs=True)
    used = gpu_memory()
    release(saver)
    assert used - gpu_memory() > POOL
    post(saver, "/resume_memory_occupation")
    post(saver, "/update_weights_from_disk", {"model_path": str(saver.model)})
    check_same(saver.client.generate(prompt, 16, logprobs=True), before)
