"""What a retraction takes from the tree."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest
from sglang.srt.managers import schedule_batch
from sglang.srt.runtime_context import get_context

from kvc_patches.retraction import around_release_req

from .model import P, ToyServer

STEPS = 20  # tokens that SGLang makes room for, for each request that stays


@pytest.mark.parametrize("options", [dict(high="bf16"), dict(high="k4v4")])
def test_a_retraction_evicts_as_many_cached_tokens_as_the_rest_will_write(options, monkeypatch):
    server = ToyServer(window=0, blocks=9, **options)
    for i in range(24):  # until the cache is full of prompts of one block
        server.finish(server.admit([*range(1000 * i, 1000 * i + P), 1]))
    free = server.allocator.available_size() // P
    held = server.runtime.take([0] * free) if free else []
    cached, stay = server.tree.evictable_slots(), 9
    monkeypatch.setattr(schedule_batch, "release_kv_cache", lambda *args, **options: None)
    with get_context().override_server_args(device="cpu"):
        around_release_req(
            schedule_batch.release_req, req=MagicMock(), remaing_req_count=stay, req_to_token_pool=None,
            token_to_kv_pool_allocator=server.allocator, tree_cache=server.tree, hisparse_coordinator=None,
        )  # fmt: skip
    taken = cached - server.tree.evictable_slots()
    ratio = server.runtime.store.block_formats[-1].pages / server.runtime.layout.block_pages_bf16
    # A whole uncompressed block is the least that there can be room for.
    assert cached > 3 * STEPS * stay and taken <= STEPS * stay + P / ratio
    assert server.allocator.available_size() >= STEPS * stay * ratio
    server.runtime.free(held)
    server.check()
