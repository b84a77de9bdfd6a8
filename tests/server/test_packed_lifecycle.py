"""Requests that are aborted, paused or refused do not affect others."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from bench import common
from bench.client import RequestRefused

from .conftest import BLOCK, ROWS, STOCK, border, tokens

ANSWER = 140  # tokens; such an answer outlasts the request to pause


class Stream(threading.Thread):
    """A streaming request in the background: `begun` is set at its first token, `events` are its chunks."""

    def __init__(self, server, prompt, n, **options):
        super().__init__(daemon=True)
        self.url = server.url + "/generate"
        self.payload = server.client.payload(prompt, n, stream=True, **options)
        self.begun = threading.Event()
        self.events: list[dict] = []
        self.closing = threading.Event()
        self.start()

    def run(self):
        with requests.post(self.url, json=self.payload, stream=True, timeout=300) as response:
            for line in response.iter_lines(decode_unicode=True):
                if line.startswith("data: {"):
                    self.events.append(json.loads(line[6:]))
                    self.begun.set()
                    self.last = time.monotonic()
                if self.closing.is_set():
                    return

    @property
    def finish(self) -> str | None:
        reason = self.events[-1]["meta_info"]["finish_reason"] if self.events else None
        return reason and reason["type"]

    def wait(self, seconds: float = 120) -> Stream:
        assert self.begun.wait(seconds), "the request did not start"
        return self


def test_aborted_request_does_not_affect_others(small, rng):
    """One of three running requests is aborted; the others finish in full, and cached blocks stay cached."""
    prompts = [tokens(rng, 3 * BLOCK + 11 * i) for i in range(3)]
    streams = [Stream(small, p, 1000 if i == 1 else 40, rid=f"abort-{i}") for i, p in enumerate(prompts)]
    for s in streams:
        s.wait()
    small.client.post("/abort_request", {"rid": "abort-1"}).raise_for_status()
    for s in streams:
        s.join(120)
    assert [s.finish for s in streams] == ["length", "abort", "length"]
    assert small.client.generate(prompts[1], 2).cached_tokens >= border(len(prompts[1]) - 1)


def test_request_can_be_aborted_during_prefill(small, rng):
    """A prompt of 24 chunks is aborted before its first token while another request decodes."""
    other = Stream(small, tokens(rng, 100), 60).wait()
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(small.client.generate, tokens(rng, 3072), 50, rid="long")
        time.sleep(0.05 if common.has_gpu() else 0.3)  # a GPU answers within 0.3 s
        small.client.post("/abort_request", {"rid": "long"}).raise_for_status()
        outcome = _finish_of(long)
    other.join(120)
    assert outcome == "abort"
    assert other.finish == "length"


def _finish_of(future) -> str:
    try:
        return future.result(120).finish["type"]
    except RequestRefused as refused:  # aborted in the queue, before it ran
        assert "abort" in str(refused).lower()
        return "abort"


def test_closed_connection_frees_request(small, rng):
    """A connection closed in the middle of an answer frees the request; the server is idle soon after (flush
    succeeds)."""
    stream = Stream(small, tokens(rng, 2 * BLOCK), 1000).wait()
    stream.closing.set()
    stream.join(60)
    small.client.flush(wait=60)


def test_abort_all(small, rng):
    streams = [Stream(small, tokens(rng, 90 + 40 * i), 600) for i in range(5)]
    for s in streams:
        s.wait()
    small.client.post("/abort_request", {"abort_all": True}).raise_for_status()
    for s in streams:
        s.join(60)
    assert [s.finish for s in streams] == ["abort"] * 5


@pytest.mark.skipif(STOCK, reason="stock SGLang computes the first chunk again until its memory is spent")
def test_warm_up_bootstrap_host_with_prompt_of_several_chunks(small, rng):
    stream = Stream(small, tokens(rng, 5 * BLOCK), 4, bootstrap_host="2.2.2.2").wait(60)
    stream.join(60)
    assert stream.finish == "length"


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_pause_and_continue(small, rng, mode):
    """No tokens are generated while paused; afterwards every request ends at its full length."""
    streams = [Stream(small, tokens(rng, 150 + 20 * i), ANSWER).wait() for i in range(3)]
    small.client.post("/pause_generation", {"mode": mode}).raise_for_status()
    try:
        before = None
        while before != (before := [len(s.events) for s in streams]):
            time.sleep(2)  # tokens of the running step arrive; a step takes a while on a busy machine
        time.sleep(1.5)
        assert [len(s.events) for s in streams] == before
        assert any(s.finish is None for s in streams), "all were done before the pause"
    finally:
        small.client.post("/continue_generation", {}).raise_for_status()
    for s in streams:
        s.join(180)
    assert [s.finish for s in streams] == ["length"] * 3
    assert [s.events[-1]["meta_info"]["completion_tokens"] for s in streams] == [ANSWER] * 3


def test_refused_requests_do_not_affect_others(small, rng):
    other = Stream(small, tokens(rng, 200), 80).wait()
    bad = [
        {"input_ids": tokens(rng, 9000)},
        {"input_ids": tokens(rng, 10), "sampling_params": {"temperature": -1}},
        {"input_ids": tokens(rng, 10), "sampling_params": {"max_new_tokens": -5}},
        {"input_ids": []},
        {"sampling_params": {"max_new_tokens": 4}},
    ]
    codes = [small.client.post("/generate", body).status_code for body in bad]
    other.join(120)
    assert all(400 <= code < 500 for code in codes), codes
    assert other.finish == "length"
    assert other.events[-1]["meta_info"]["completion_tokens"] == 80


@pytest.mark.skipif(STOCK, reason="stock SGLang does not tell its pages")
def test_all_memory_is_free_after_mixed_requests(small, rng):
    """After aborts, hits, forks and refusals a flush frees all pages."""
    start = small.client.when_idle()["pages_free"]
    trunk = tokens(rng, 2 * BLOCK)
    streams = [Stream(small, trunk + tokens(rng, 30 * i + 5), 30 + 200 * (i % 2)) for i in range(6)]
    for s in streams:
        s.wait()
    small.client.post("/abort_request", {"abort_all": True}).raise_for_status()
    for s in streams:
        s.join(60)
    small.client.flush()
    assert small.client.when_idle()["pages_free"] == start


def test_urgent_request_preempts_others(small, rng):
    """Low-priority requests take all rows: an urgent one ends before them, and the one it displaced ends in full."""
    patient = [Stream(small, tokens(rng, BLOCK + 9 * i), 2 * BLOCK, priority=0) for i in range(ROWS)]
    for s in patient:
        s.wait()
    urgent = Stream(small, tokens(rng, 2 * BLOCK + 5), 6, priority=100)
    for s in (urgent, *patient):
        s.join(300)
    assert urgent.finish == "length" and urgent.last < min(s.last for s in patient)
    counts = [s.events[-1]["meta_info"] for s in patient]
    assert [c["completion_tokens"] for c in counts] == [2 * BLOCK] * ROWS
    assert sum(c["num_retractions"] for c in counts) == 1


def test_profile_can_be_taken(small, rng, tmp_path):
    """In the scheduler, SGLang asks the platform which activities it can trace."""
    body = {"num_steps": 2, "activities": ["CPU"], "output_dir": str(tmp_path)}
    small.client.post("/start_profile", body).raise_for_status()
    small.client.generate(tokens(rng, 20), 8)
    assert list(tmp_path.rglob("*.json*"))
