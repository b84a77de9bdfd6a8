"""Where the cached tokens of a prompt came from: device, host memory or files."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt.managers.schedule_batch import Req, split_cached_prefix_by_tier

from kvc_patches.admission import after_host_hits
from sglang_kvc.adapter import hit_sources

from .model import P
from .test_stored_prompts import EVERYTHING, run, serve, tokens, write_files


def sources(req: Req) -> tuple[int, int, int]:
    """Blocks that SGLang reports from the device, from host memory and from storage."""
    counts = (req.cached_tokens_device, req.cached_tokens_host, req.cached_tokens_storage)
    assert sum(counts) == req.cached_tokens
    return tuple(n // P for n in counts)


def ask(server, prompt: list[int]) -> Req:
    server.submit(prompt, [6], None, None)
    return list(server.requests.values())[-1]


def answered(server, prompt: list[int]) -> Req:
    req = ask(server, prompt)
    run(server)
    return req


def test_loaded_blocks_count_as_host_hits_of_the_prompt_that_loaded_them():
    with serve() as server:
        prompt = [*tokens(1, 4), 1]
        assert sources(answered(server, prompt)) == (0, 0, 0)
        server.tree_cache.evict(EVERYTHING)
        first, second = ask(server, prompt), ask(server, [*tokens(1, 3), 2])
        run(server)
        assert sources(first) == (0, 4, 0)
        assert sources(second) == (3, 0, 0)  # it waits for the load of the other prompt
        assert sources(answered(server, prompt)) == (4, 0, 0)


def test_part_on_the_device_counts_as_device_hit():
    with serve() as server:
        answered(server, [*tokens(1, 6), 1])
        server.tree_cache.evict(EVERYTHING)
        answered(server, [*tokens(1, 2), 1])
        assert sources(answered(server, [*tokens(1, 6), 1])) == (2, 4, 0)


def test_records_that_were_read_count_as_storage_hits(tmp_path):
    """Two blocks are in host memory, four more only in files."""
    prompt = [*tokens(1, 6), 1]
    write_files(tmp_path, [prompt])
    with serve(tmp_path) as server:
        answered(server, [*tokens(1, 2), 1])
        server.tree_cache.evict(EVERYTHING)
        assert sources(answered(server, prompt)) == (0, 2, 4)
        server.tree_cache.evict(EVERYTHING)
        assert sources(answered(server, prompt)) == (0, 6, 0)


def test_prefix_that_comes_back_in_rounds_counts_as_storage_hit(tmp_path):
    """Host memory holds 5 of its 16 blocks."""
    prompt = [*tokens(1, 16), 1]
    write_files(tmp_path, [prompt])
    with serve(tmp_path, host=64_000) as server:
        assert sources(answered(server, prompt)) == (0, 0, 16)


@pytest.mark.parametrize(
    ("prefix", "loaded", "read", "expected"),
    [
        pytest.param(9, [(2, 9)], [(5, 9)], (2, 3, 4), id="host memory, then files"),
        pytest.param(6, [(2, 9)], [(5, 9)], (2, 3, 1), id="the last tokens were lost again"),
        pytest.param(2, [(2, 9)], [(5, 9)], (2, 0, 0), id="all were lost again"),
        pytest.param(1, [(2, 9)], [(5, 9)], (1, 0, 0), id="more were lost"),
        pytest.param(12, [(2, 9)], [(2, 9)], (5, 0, 7), id="another prompt has computed more"),
        pytest.param(9, [(2, 5), (5, 9)], [(2, 5), (5, 9)], (2, 0, 7), id="two rounds"),
        pytest.param(9, [(2, 9), (6, 9)], [], (2, 7, 0), id="the last tokens were loaded twice"),
        pytest.param(9, [(6, 9)], [(2, 9)], (6, 0, 3), id="another prompt has loaded the first tokens"),
        pytest.param(9, [], [(2, 9)], (9, 0, 0), id="another prompt has loaded everything"),
    ],
)
def test_sources_add_up_to_the_prefix_at_admission(prefix, loaded, read, expected):
    req = SimpleNamespace(prefix_len=prefix, storage_hit_length=0)
    for span in loaded:
        hit_sources.note_loaded(req, *span)
    for span in read:
        hit_sources.note_read(req, *span)
    hit_sources.count_hits(req)
    assert split_cached_prefix_by_tier(prefix, after_host_hits(0, req), req.storage_hit_length) == expected


@pytest.mark.parametrize("chunk", [P, 16 * P])
def test_chunks_count_their_hit_once(chunk):
    with serve(chunk=chunk) as server:
        answered(server, [*tokens(1, 4), 1])
        server.tree_cache.evict(EVERYTHING)
        req = answered(server, [*tokens(1, 4), *tokens(2, 3), 1])
        assert sources(req) == (0, 4, 0)
