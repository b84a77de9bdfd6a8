"""Blocks evicted from the pool go to host memory and to files byte for byte, and a prompt that hits them restores
them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file

from bench.client import RequestRefused

from .conftest import BLOCK, LOSSLESS, ROWS, STOCK, border, tokens
from .test_packed_lifecycle import Stream

pytestmark = pytest.mark.skipif(STOCK, reason="about the host tier of the compressed cache")


@pytest.mark.parametrize("sampling", [{}, LOSSLESS], ids=["packed", "lossless"])
def test_evicted_prompt_is_answered_as_before(hosted, rng, sampling):
    """Many prompts evict the first one from a small pool. It hits as many tokens as before and reads the same bytes, so
    it gives the same log-probabilities."""
    client, prompt = hosted.client, tokens(rng, 6 * BLOCK + 9)
    client.generate(prompt, 2, sampling=sampling)
    before = client.generate(prompt, 8, sampling=sampling, logprobs=True)
    assert before.cached_tokens == border(len(prompt))
    client.generate_many([tokens(rng, 5 * BLOCK) for _ in range(30)], 2, parallel=2)
    stats = client.when_idle()
    assert stats["host_blocks"] > 30 and stats["host_saved_bytes"] > 0
    after = client.generate(prompt, 8, sampling=sampling, logprobs=True)
    assert (after.ids, after.logprobs, after.cached_tokens) == (before.ids, before.logprobs, before.cached_tokens)
    assert client.when_idle()["host_loaded_bytes"] > stats["host_loaded_bytes"]


def samples(client, prefix: str) -> dict[tuple[str, ...], float]:
    """Values of `/metrics` whose names begin with `prefix`, by name and by pool, source or reason."""
    text = requests.get(client.url + "/metrics", timeout=60).text
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(prefix):
                labels = (sample.labels[name] for name in ("cache_source", "reason", "pool") if name in sample.labels)
                key = (sample.name.removeprefix("sglang:"), *labels)
                found[key] = found.get(key, 0) + sample.value
    return found


def test_metrics_show_traffic_and_hits_of_tiers(hosted, rng):
    """An evicted prompt is a hit in host memory, and after a restart a hit in storage. SGLang's counters agree with the
    statistics of the cache."""
    client, prompt = hosted.client, tokens(rng, 6 * BLOCK + 9)
    client.generate(prompt, 2)
    assert client.generate(prompt, 2).meta["cached_tokens_details"] == {"device": border(len(prompt)), "host": 0}
    client.generate_many([tokens(rng, 5 * BLOCK) for _ in range(30)], 2, parallel=2)
    before, stats = samples(client, "sglang:"), client.when_idle()
    body = {"prompt": prompt, "model": "m", "max_tokens": 2, "return_cached_tokens_details": True}
    answer = client.post("/v1/completions", body).json()
    details = answer["sglext"]["cached_tokens_details"]
    hit = border(len(prompt))
    assert details["host"] > 0 and details["device"] + details["host"] == hit
    assert client.generate(prompt, 2).meta["cached_tokens_details"] == {"device": hit, "host": 0}
    client.generate_many([tokens(rng, 5 * BLOCK) for _ in range(4)], 2, parallel=2)
    later = client.when_idle()
    after = samples(client, "sglang:")

    def grown(*key: str) -> float:
        return after.get(key, 0) - before.get(key, 0)

    assert grown("load_back_tokens_total", "kv") == grown("cached_tokens_total", "host") == details["host"]
    assert grown("load_back_bytes_total") == later["host_loaded_bytes"] - stats["host_loaded_bytes"] > 0
    assert grown("load_back_duration_seconds_count") == 1 and grown("load_back_duration_seconds_sum") > 0
    assert after["hicache_backup_bytes_total",] == later["host_saved_bytes"] > 0
    assert after["hicache_backup_tokens_total", "kv"] > 30 * BLOCK
    assert after["hicache_backup_duration_seconds_sum",] > 0
    assert after["hicache_dropped_tokens_total", "host_pressure", "kv"] == 0
    assert after["backuped_tokens_total",] > 30 * BLOCK and not grown("prefetched_tokens_total")
    gauges = samples(client, "sglang_kvc:")
    assert gauges["sglang_kvc:host_bytes_total",] == later["host_bytes_total"] > 0
    assert gauges["sglang_kvc:disk_blocks",] > 0

    os.killpg(hosted.process.pid, signal.SIGKILL)
    hosted.stop()
    hosted.start()
    again = hosted.client.generate(prompt, 2).meta["cached_tokens_details"]
    assert again == {"device": 0, "host": 0, "storage": hit}
    after = samples(hosted.client, "sglang:")
    assert after["cached_tokens_total", "storage"] == after["prefetched_tokens_total",] == hit


def test_many_evicted_prompts_are_restored_at_once(hosted, rng):
    """More prompts than the pool holds, with shared prefixes, run three times in different orders without a leak."""
    trunks = [tokens(rng, 3 * BLOCK) for _ in range(4)]
    prompts = [rng.choice(trunks) + tokens(rng, rng.randint(1, 4 * BLOCK)) for _ in range(24)]
    answers = {}
    for turn in range(3):
        order = rng.sample(range(len(prompts)), len(prompts))
        got = hosted.client.generate_many([prompts[i] for i in order], 2, parallel=ROWS)
        for i, answer in zip(order, got):
            assert len(answer.ids) == 2
            if turn:
                assert answer.cached_tokens == border(len(prompts[i]) - 1)
            answers.setdefault(i, answer.ids)
    assert hosted.client.when_idle()["host_loaded_bytes"] > 0


def test_restarted_server_answers_from_files_of_killed_one(hosted, rng):
    """The next server on the same folder hits as many tokens and gives the same log-probabilities."""
    prompts = [tokens(rng, n * BLOCK + 9) for n in (6, 4)]
    before = []
    for prompt, sampling in zip(prompts, ({}, LOSSLESS)):
        hosted.client.generate(prompt, 2, sampling=sampling)
        before.append(hosted.client.generate(prompt, 8, sampling=sampling, logprobs=True))
    stats = hosted.client.when_idle()
    assert stats["disk_written_bytes"] > 0 and stats["disk_blocks"] >= 10
    os.killpg(hosted.process.pid, signal.SIGKILL)
    hosted.stop()
    hosted.start()
    again = hosted.client
    assert again.stats()["disk_blocks"] == stats["disk_blocks"]
    for prompt, sampling, old in zip(prompts, ({}, LOSSLESS), before):
        new = again.generate(prompt, 8, sampling=sampling, logprobs=True)
        assert (new.ids, new.logprobs, new.cached_tokens) == (old.ids, old.logprobs, old.cached_tokens)
    stats = again.when_idle()
    assert stats["disk_read_bytes"] > 0 and not stats["disk_damaged"]


def changed_model(folder: Path, into: Path) -> Path:
    """A copy of a model with other weights."""
    into.mkdir()
    for file in folder.iterdir():
        if file.suffix == ".safetensors":
            weights = load_file(file)
            save_file({name: 1.1 * w if w.ndim == 1 else w for name, w in weights.items()}, into / file.name)
        else:
            (into / file.name).symlink_to(file)
    return into


def test_weight_update_hits_only_blocks_of_its_weights(hosted, rng, tmp_path):
    """Blocks of other weights are gone from the device and from host memory. Their files stay for these weights."""
    client, prompt = hosted.client, tokens(rng, 6 * BLOCK + 9)
    client.generate(prompt, 2)
    before = client.generate(prompt, 8, logprobs=True)
    client.generate_many([tokens(rng, 5 * BLOCK) for _ in range(30)], 2, parallel=2)
    assert client.when_idle()["host_blocks"] > 30

    def update(folder: str | Path) -> None:
        assert client.post("/update_weights_from_disk", {"model_path": str(folder)}).json()["success"]

    try:
        update(changed_model(Path(hosted.model), tmp_path / "other"))
        changed = client.generate(prompt, 8, logprobs=True)
        assert changed.cached_tokens == 0 and changed.logprobs != before.logprobs
        client.when_idle()
    finally:
        update(hosted.model)
    after = client.generate(prompt, 8, logprobs=True)
    assert (after.ids, after.logprobs, after.cached_tokens) == (before.ids, before.logprobs, before.cached_tokens)


def test_storage_backend_replaces_files(stored, rng):
    """Blocks go to SGLang's own `file` backend. The next server answers from it until it is cleared."""
    prompts = [tokens(rng, n * BLOCK + 9) for n in (6, 4)]
    before = []
    for prompt, sampling in zip(prompts, ({}, LOSSLESS)):
        stored.client.generate(prompt, 2, sampling=sampling)
        before.append(stored.client.generate(prompt, 8, sampling=sampling, logprobs=True))
    assert stored.client.when_idle()["disk_blocks"] >= 10
    os.killpg(stored.process.pid, signal.SIGKILL)
    stored.stop()
    stored.start()
    again = stored.client
    for prompt, sampling, old in zip(prompts, ({}, LOSSLESS), before):
        new = again.generate(prompt, 8, sampling=sampling, logprobs=True)
        assert (new.ids, new.logprobs, new.cached_tokens) == (old.ids, old.logprobs, old.cached_tokens)
    assert new.meta["cached_tokens_details"]["storage"] == new.cached_tokens
    assert new.meta["cached_tokens_details"]["storage_backend"] == "HiCacheFile"
    assert samples(again, "sglang:prefetched_tokens_total")["prefetched_tokens_total",] == 10 * BLOCK
    stats = again.when_idle()
    assert stats["disk_read_bytes"] > 0 and not stats["disk_damaged"]
    again.post("/hicache/storage-backend/clear")
    again.flush()
    assert not again.generate(prompts[0], 2).cached_tokens


def test_prompt_that_fits_only_compressed_is_served(hosted, rng):
    """The prompt is served up to the limit that the server reports, with the same answer from the cache. One more token
    is refused, and so are an uncompressed request of that length and a prompt too long for any budget."""
    client, info = hosted.client, hosted.client.server_info()
    limits = info["internal_states"][0]["kvc"]["longest_prompt"]
    assert max(limits.values()) == info["max_req_input_len"] - 1
    limit = limits["default"]
    assert limit > 2 * info["max_total_num_tokens"]
    prompt = tokens(rng, limit)
    cold = client.generate(prompt, 1, logprobs=True)
    warm = client.generate(prompt, 1, logprobs=True)
    assert warm.cached_tokens == border(limit - 1) and warm.ids == cold.ids
    one_more, longest, up_to = tokens(rng, limit + 1), tokens(rng, 2 * max(limits.values())), f"up to {limit} tokens"
    for longer, sampling, reason in (one_more, {}, up_to), (longest, {}, up_to), (prompt, LOSSLESS, "at lossless"):
        with pytest.raises(RequestRefused, match=reason):
            client.generate(longer, 1, sampling=sampling)


def test_longest_prompt_of_any_quality_is_served(hosted, rng):
    client = hosted.client
    limits = client.kvc_info()["longest_prompt"]
    name, limit = max(limits.items(), key=lambda item: item[1])
    sampling = {"custom_params": {} if name == "default" else {"kvc": name}}
    assert len(client.generate(tokens(rng, limit), 1, sampling=sampling).ids) == 1
    with pytest.raises(RequestRefused, match=f"up to {limit} tokens"):
        client.generate(tokens(rng, limit + 1), 1, sampling=sampling)


def test_cache_can_be_flushed_while_paused_with_loads(hosted, rng):
    """Prompts in host memory arrive, and a pause retracts all requests while loads for them may be queued or under way.
    All requests are answered in full after the flush."""
    client, stored = hosted.client, [tokens(rng, 5 * BLOCK + 3) for _ in range(4)]
    client.generate_many(stored, 2, parallel=2)
    client.generate_many([tokens(rng, 5 * BLOCK) for _ in range(30)], 2, parallel=2)
    running = Stream(hosted, tokens(rng, BLOCK), 300).wait()
    hits = [Stream(hosted, prompt, 4) for prompt in stored]
    client.post("/pause_generation", {"mode": "retract"}).raise_for_status()
    client.flush(wait=0)  # SGLang lets no flush that waits succeed beside waiting requests
    client.post("/continue_generation", {}).raise_for_status()
    for stream, length in ((running, 300), *((hit, 4) for hit in hits)):
        stream.join(120)
        assert stream.finish == "length" and len(stream.events[-1]["output_ids"]) == length
