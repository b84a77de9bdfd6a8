"""Retraction: how much it evicts, and which blocks the tree keeps."""

from __future__ import annotations

import time
from unittest.mock import MagicMock

import pytest
import torch
from sglang.srt.managers import schedule_batch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.runtime_context import get_context, get_parallel

from kvc_kernels import ops
from kvc_patches.retraction import around_release_req
from sglang_kvc.cache.blocks import State

from . import record
from .audit import kept_blocks
from .memory_backend import server_args
from .model import H, L, P, ToyServer, make_runtime
from .overlap import Overlap, configured

STEPS = 20  # tokens that SGLang makes room for, for each request that stays


@pytest.mark.parametrize("options", [dict(high="bf16"), dict(high="k4v4")])
def test_retraction_evicts_as_many_tokens_as_rest_will_write(options, monkeypatch):
    server = ToyServer(window=0, blocks=9, **options)
    for i in range(24):  # until prompts of one block fill the cache
        server.finish(server.admit([*range(1000 * i, 1000 * i + P), 1]))
    free = server.allocator.available_size() // P
    blocks = server.runtime.take([0] * free) if free else []
    cached, stay = server.tree.evictable_slots(), 9
    monkeypatch.setattr(schedule_batch, "release_kv_cache", lambda *args, **options: None)
    with get_context().override_server_args(device="cpu"):
        around_release_req(
            schedule_batch.release_req, req=MagicMock(kvc=None), remaing_req_count=stay, req_to_token_pool=None,
            token_to_kv_pool_allocator=server.allocator, tree_cache=server.tree, hisparse_coordinator=None,
        )  # fmt: skip
    taken = cached - server.tree.evictable_slots()
    ratio = server.runtime.store.block_formats[-1].pages / server.runtime.layout.block_pages_bf16
    # A whole uncompressed block is the smallest unit of room.
    assert cached > 3 * STEPS * stay and taken <= STEPS * stay + P / ratio
    assert server.allocator.available_size() >= STEPS * stay * ratio
    server.runtime.free(blocks)
    server.check()


def retracted(server: ToyServer, req) -> None:
    """Do what SGLang does with a request that it retracts."""
    req.kv.kv_committed_len = len(req.full_untruncated_fill_ids)
    req.refresh_fill_ids = lambda: None

    def release(req, tree_cache, checkpoint):
        server.finish(req, insert=checkpoint)

    with pytest.MonkeyPatch.context() as patch, get_context().override_server_args(device="cpu"):
        patch.setattr(schedule_batch, "release_kv_cache", release)
        req.reset_for_retract = lambda: None
        around_release_req(
            schedule_batch.release_req, req=req, remaing_req_count=0, req_to_token_pool=None,
            token_to_kv_pool_allocator=server.allocator, tree_cache=server.tree, hisparse_coordinator=None,
        )  # fmt: skip


@pytest.mark.parametrize("window", [0, 2 * P])
@pytest.mark.parametrize("options", [dict(high="bf16"), dict(high="k4v4")])
def test_retracted_request_hits_its_packed_blocks(options, window):
    """It hits its prompt and answer up to the last full block, all packed."""
    server = ToyServer(window=window, blocks=12, **options)
    req = server.admit([*range(P), 1, 2, 3])
    for token in range(5 * P):
        assert server.decode(req, 1000 + token)
    history = list(req.full_untruncated_fill_ids)
    retracted(server, req)
    server.check()
    again = server.admit(history)
    assert again.kv.cache_protected_len == 6 * P
    packed = server.runtime.blocks.state[again.kvc.blocks[:6]] == State.PACKED
    assert packed.all() == (options["high"] != "bf16")
    server.check()


def test_blocks_kept_by_retraction_can_be_evicted():
    server = ToyServer(window=0, blocks=12, high="k4v4")
    req = server.admit([*range(3 * P), 1])
    retracted(server, req)
    server.tree.evict(EvictParams(num_tokens=10**9))
    assert server.allocator.used_slots() == 0
    server.check()


@pytest.mark.parametrize("place", ["disk", "storage"])
def test_retracted_request_finds_its_blocks_behind_host_memory(tmp_path, place):
    """It looks once before its first forward, and again after all its blocks have left the device and the host."""
    options = {"disk": str(tmp_path), "disk_size": 1 << 20} if place == "disk" else {"storage": "dynamic"}
    runtime = make_runtime(high="k4v4", window=0, host_memory=2_000_000, **options)
    args = server_args(str(tmp_path))
    with get_parallel().override(tp_rank=0, tp_size=1), configured(runtime, 8 * P, retract_every=10**6):
        server = Overlap(runtime, 8 * P, disable=False, server_args=args)
        tree = server.tree_cache
        server.submit([*range(6 * P), 1], [5000 + i for i in range(40)], None, None)
        for _ in range(20):
            server.turn()
        server.pause()
        tree.evict(EvictParams(num_tokens=10**9))
        runtime.flush()
        until = time.monotonic() + 30
        while len(tree.disk.store) < 6 and time.monotonic() < until:
            tree.disk.poll()
        tree.evict_host(10**9)
        computed = server.processed_tokens_counter
        while server.busy and time.monotonic() < until:
            server.turn()
        (req,) = server.requests.values()
        assert list(req.output_ids) == req.answer and runtime.host_tier.loaded_blocks == 6
        assert server.processed_tokens_counter - computed < P
        tree.disk.close()


def kept_tokens(server, req) -> list[list[int]]:
    """The tokens that each layer and head keeps of a packed one-shot prompt, found by their keys."""
    blocks, store = torch.tensor(kept_blocks(req)), server.runtime.store
    want, kept = record.rows(req.history[: len(req.origin_input_ids)])[:, 0], []
    for layer in range(L):
        keys, _, tier = ops.load_dense(store, layer, blocks)
        for head in range(H):
            stored = keys[:, head].flatten(0, 1)[tier[:, head].flatten() > 0]
            kept.append(torch.cdist(stored, want[:, layer, head]).argmin(-1).tolist())
    return kept


@pytest.mark.parametrize("chunk", [None, 2 * P])
@pytest.mark.parametrize("answered", [3, P + 20])
def test_retracted_one_shot_prompt_keeps_same_tokens(chunk, answered):
    """The answer so far is computed again, but its queries do not rank the prompt, and its blocks are packed like those
    of any answer."""
    runtime = make_runtime(high="k4v4", window=0, blocks=16)
    with configured(runtime, chunk, retract_every=10**6):
        server = Overlap(runtime, chunk, disable=False)
        server.submit([*range(10 * P), 1, 2, 3], [5000 + i for i in range(2 * P)], "one-shot:20x", None)
        (req,) = server.requests.values()
        kept = []
        for retracted in (False, True):
            while len(req.output_ids) < answered + 3 * retracted:
                server.turn()
            server.runtime.settle()
            kept.append(kept_tokens(server, req))
            gap, packed = req.kvc.gap, runtime.blocks.format_id[req.kvc.blocks[10:]].tolist()
            assert gap > 0 and packed == [1] * (answered // P) + [0]
            if not retracted:
                server.pause()
                assert req.kvc is None
        assert kept[0] == kept[1]
        while server.busy:
            server.turn()
        assert list(req.output_ids) == req.answer


def test_retraction_without_prefix_cache_keeps_nothing():
    server = ToyServer(window=0, blocks=12, high="k4v4", disable=True)
    retracted(server, server.admit([*range(3 * P), 1]))
    assert server.allocator.used_slots() == 0
    server.check()


@pytest.mark.parametrize("retracted", [False, True])
def test_strip_thinking_keeps_prompt_and_retracted_blocks(retracted):
    """With `--strip-thinking-cache` the tree keeps the prompt of an answer with thoughts. Blocks that a retraction gave
    to the tree stay there and have one owner."""
    runtime = make_runtime(high="k4v4", window=0)
    with configured(runtime, P, retract_every=1000, strip=True):
        server = Overlap(runtime, P, disable=False)
        server.submit([*range(P + 5)], [5000 + i for i in range(3 * P)], None, None)
        (req,) = server.requests.values()
        req.reasoning_tokens = 1
        for turn in range(1000):
            if not server.busy:
                break
            if retracted and turn == 3 * P // 2:
                server.pause()
            server.turn()
        assert list(req.output_ids) == req.answer
        assert server.tree_cache.evictable_slots() == (2 * P if retracted else P)
        assert server.token_to_kv_pool_allocator.used_slots() == server.tree_cache.evictable_slots()
