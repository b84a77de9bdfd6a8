"""Blocks of a level that a request names: no demotion, and the way to host memory and back."""

from __future__ import annotations

from unittest import mock

import pytest

from kvc_kernels import ops
from sglang_kvc.options.request_quality import LOSSLESS

from .audit import _ids, _nodes, unpacked_records
from .model import P
from .overlap import Overlap
from .test_overlap import LADDER
from .test_stored_prompts import EVERYTHING, run, serve, tokens

BLOCKS = 3
PROMPT = [*tokens(1, BLOCKS), 1]  # at every level
Contents = dict[str | None, list[tuple[str, bytes]]]  # namespace -> format and bytes of each block


def ask(server: Overlap, level: str | None):
    server.submit(PROMPT, [5], level, None)
    run(server)
    server.runtime.settle()
    return [*server.requests.values()][-1]


def on_device(server: Overlap) -> Contents:
    server.runtime.flush()
    return _contents(server, "value", lambda ids: (server.runtime.store, ids))


def in_host_memory(server: Overlap) -> Contents:
    server.runtime.flush()
    return _contents(server, "host_value", lambda ids: unpacked_records(server.runtime.host_tier, ids))


def _contents(server: Overlap, place: str, read) -> Contents:
    found: Contents = {}
    for node in _nodes(server.tree_cache):
        data = node.component_data[server.tree_cache.component.component_type]
        if ids := _ids(server.tree_cache.component, getattr(data, place)):
            store, ids = read(ids)
            names = [store.block_formats[i].high.name for i in store.format_id[ids].tolist()]
            blocks = [ops.block_digest(store, block, scores=False) for block in ids]
            found.setdefault(node.key.extra_key, []).extend(zip(names, blocks))
    return found


@pytest.mark.parametrize(
    "options, levels",
    [({"high": "k4v4", "levels": ("k8v8", "k2v2")}, ()), ({**LADDER, "levels": ("k4v4", "k4v2")}, ("k8v4",))],
    ids=["levels", "levels and floor"],
)
def test_named_level_returns_unchanged_from_host_memory(options, levels):
    """Everything that can be demoted is, and all blocks are evicted. One prompt has separate blocks at each level."""
    options = {key: value for key, value in options.items() if key != "window"}
    levels = (*levels, *options["levels"], LOSSLESS)
    with serve(**options) as server:
        spaces = {level: ask(server, level).extra_key for level in (None, *levels)}
        fresh = on_device(server)
        with mock.patch.object(server.runtime.capacity, "missing_pages", return_value=10**6):
            server.tree_cache.component.demotions.make_room(P)
        kept = on_device(server)
        lowest = options.get("floor", options["high"])
        for level, space in spaces.items():
            name = {None: lowest, LOSSLESS: "bf16"}.get(level, level)
            assert [found for found, _ in kept[space]] == [name] * BLOCKS
            assert (kept[space] == fresh[space]) == (level is not None or "floor" not in options)
        server.tree_cache.evict(EVERYTHING)
        assert in_host_memory(server) == kept and not on_device(server)
        for level in (*levels, None):
            assert ask(server, level).cached_tokens == BLOCKS * P
        assert on_device(server) == kept
