"""Uncompressed blocks of cached prefixes, which a prefill stages fake-quantized: their number is bounded, and their
memory is reserved."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

from kvc_patches.admission import around_add_chunked_req, around_add_one_req
from sglang_kvc.cache.build import build_runtime
from sglang_kvc.cache.sizing import STAGED_TOKENS
from sglang_kvc.options.config import KvcConfig
from sglang_kvc.options.request_quality import LOSSLESS

from .model import P, ToyServer
from .test_admission import adder

LAYERS, HEADS, DIM, MIB = 16, 8, 128, 1 << 20


@pytest.fixture(autouse=True)
def configured():
    """Provides the server options that the adder reads."""
    with runtime_context.get_context().override_server_args(device="cpu", chunked_prefill_size=4 * P):
        yield


@pytest.fixture
def server():
    """A server with a running request whose four blocks all lie in its window; a prefill may stage nine blocks."""
    toy_server = ToyServer(high="k4v4", window=4 * P, blocks=24)
    toy_server.runtime.capacity.sizing = dataclasses.replace(toy_server.runtime.sizing, staged_tokens=9 * P)
    toy_server.admit([*range(4 * P), 1])
    return toy_server


def turn(server: ToyServer, level: str | None = None) -> MagicMock:
    """One of SGLang's requests: a few new tokens after the blocks of the running request."""
    node = server.running[0].last_node
    req = MagicMock(
        full_untruncated_fill_ids=[0] * (4 * P + 5), prefix_len=4 * P, output_ids=[], host_hit_length=0,
        kvc_level=level, kvc_budget=None, last_node=node, kvc=server.runtime.new_sequence(),
    )  # fmt: skip
    req.sampling_params.max_new_tokens, req.sampling_params.ignore_eos = 3, False
    req.needs_host_load_back.return_value = False
    type(req).extend_len = property(lambda self: self.extend_end - self.prefix_len)
    return req


def come_in(server: ToyServer, reqs: list, chunked: MagicMock | None = None) -> list[AddReqResult]:
    running = SimpleNamespace(reqs=[turn(server)], is_empty=lambda: False)
    chosen = adder(server, chunk=4 * P, running=running)
    if chunked is not None:
        around_add_chunked_req(PrefillAdder.add_chunked_req, chosen, chunked)
    return [around_add_one_req(PrefillAdder.add_one_req, chosen, r, chunked is not None, None) for r in reqs]


def test_prompts_wait_when_prefixes_exceed_staging_limit(server):
    results = come_in(server, [turn(server) for _ in range(3)])
    assert results == [AddReqResult.CONTINUE, AddReqResult.CONTINUE, AddReqResult.OTHER]


def test_chunk_counts_toward_staging_limit(server):
    results = come_in(server, [turn(server) for _ in range(2)], chunked=turn(server))
    assert results == [AddReqResult.CONTINUE, AddReqResult.OTHER]


def test_lone_prompt_is_admitted_above_staging_limit(server):
    server.runtime.capacity.sizing = dataclasses.replace(server.runtime.sizing, staged_tokens=P)
    assert come_in(server, [turn(server)]) == [AddReqResult.CONTINUE]


def test_prompts_that_read_exact_blocks_stage_nothing(server):
    results = come_in(server, [turn(server, level=LOSSLESS) for _ in range(3)])
    assert results == 3 * [AddReqResult.CONTINUE]


def test_packed_prefixes_stage_nothing(server):
    server.finish(server.running[0])
    server.admit([*range(4 * P), *range(8 * P)])  # its window has moved past the first four blocks
    assert server.runtime.capacity.staged_tokens(server.tree.path_blocks(server.running[0].last_node)[:4], 1) == 0


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        (dict(window=0), 0),
        (dict(window=64), STAGED_TOKENS),
        (dict(window=STAGED_TOKENS + 1), STAGED_TOKENS + 1),
        (dict(window=64, high="bf16"), 0),
        (dict(window=64, policy="leankv", high="k8v4", low="k4v2"), 0),
    ],
)
def test_pool_size_leaves_room_for_staging(options, tokens):
    build = dict(num_bytes=1100 * MIB, layers=LAYERS, heads=HEADS, head_dim=DIM, dtype=torch.bfloat16, device="meta")
    runtime = build_runtime(KvcConfig(block_size=128, **{"high": "k4v4", **options}), **build)
    assert runtime.sizing.staged_tokens == tokens
    assert 1080 * MIB < runtime.store.nbytes + tokens * 4 * HEADS * DIM <= 1101 * MIB


def test_small_pool_limits_staging_to_its_size():
    runtime = build_runtime(
        KvcConfig(block_size=128, high="k4v4", window=64), num_bytes=100 * MIB, layers=LAYERS, heads=HEADS,
        head_dim=DIM, dtype=torch.bfloat16, device="meta",
    )  # fmt: skip
    assert runtime.sizing.staged_tokens == 100 * MIB // (LAYERS * 4 * HEADS * DIM) < STAGED_TOKENS
