"""Decode steps between the chunks of a prompt (`--prefill-decode-interval`)."""

from __future__ import annotations

import pytest

from sglang_kvc.options.request_quality import LOSSLESS

from .model import P, make_runtime
from .overlap import Overlap, configured

CHUNK, INTERVAL = 2 * P, 32


@pytest.mark.slow
def test_running_request_gets_its_memory_while_long_prompt_is_prefilled():
    """The prompt of 30 blocks has 15 chunks, between which the running request writes up to 480 tokens. Packed, the
    prompt would fit beside what the request has written so far, and could not give way to it any more."""
    runtime = make_runtime(blocks=12, high="k4v4", window=0)
    with configured(runtime, CHUNK, retract_every=10**6, interval=INTERVAL):
        server = Overlap(runtime, CHUNK, disable=False, context=4096)
        server.check_every = 1000
        server.submit([*range(P)], [5000 + i for i in range(12 * P)], LOSSLESS, None)
        running = server.requests["0"]
        while not running.output_ids:
            server.turn()
        server.submit([100_000 + i for i in range(30 * P)], [5000], None, None)
        for _ in range(3000):
            if not server.busy:
                break
            server.turn()
        assert all(list(r.output_ids) == r.answer for r in server.requests.values())
