"""Decode steps between the chunks of a prompt (`--prefill-decode-interval`)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_kvc.adapter.admission import _growth_between_chunks
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


@pytest.mark.parametrize(("left", "reserves"), [(CHUNK, False), (P, True)])
def test_prompt_reserves_if_this_pass_leaves_part_of_it(left, reserves):
    """A prompt of one chunk is split if other prompts of the pass leave less than a chunk."""
    runtime = make_runtime(blocks=12, high="k4v4", window=0)
    params = SimpleNamespace(max_new_tokens=1000)
    running = SimpleNamespace(
        full_untruncated_fill_ids=[0] * P, prefix_len=0, output_ids=[1], sampling_params=params, kvc_level=LOSSLESS
    )
    adder = SimpleNamespace(
        rem_chunk_tokens=left, running_batch=SimpleNamespace(reqs=[running]), new_token_ratio=0.0
    )
    with configured(runtime, CHUNK, retract_every=10**6, interval=INTERVAL):
        assert (_growth_between_chunks(adder, runtime, CHUNK) >= INTERVAL) is reserves
