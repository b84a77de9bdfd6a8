"""A waiting prompt is matched again from the node at which its last match ended."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_kvc.adapter import radix_cache
from sglang_kvc.adapter.block_key import BlockKey
from sglang_kvc.adapter.tree_host import FULL
from sglang_kvc.adapter.tree_match import match_again

from .model import P, ToyServer
from .test_overlap import KINDS, life

seen: Counter[str] = Counter()


def checked(tree, params):
    """`match_again`, compared with a match from the root: the results, and the nodes that count as used."""
    nodes = tree.tree_core._node_arena
    before = {i: node.last_access_time for i, node in nodes.items()}
    again = match_again(tree, params)
    seen["from the root" if again is None else "again"] += 1
    if again is None:
        assert {i: node.last_access_time for i, node in nodes.items()} == before
        return None
    uses = used(nodes, before)
    before = {i: node.last_access_time for i, node in nodes.items()}
    assert UnifiedRadixCache._match_tree(tree, params) == again
    assert nodes.keys() == before.keys() and used(nodes, before) == uses
    seen["stored"] += again.host_hit_length > 0
    return again


def used(nodes, before: dict) -> list[int]:
    """Ids of the nodes with a new time of access, the latest one last."""
    return sorted((i for i, time in before.items() if nodes[i].last_access_time != time),
                  key=lambda i: nodes[i].last_access_time)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, files",
    [("reuse", False), ("strip", False), ("host-levels", False), ("host-reuse", True), ("floor-host", True)],
)
def test_result_and_effects_are_those_of_match_from_root(name, files, tmp_path, monkeypatch):
    monkeypatch.setattr(radix_cache, "match_again", checked)
    seen.clear()
    life(0, replace(KINDS[name], order="hrrn"), str(tmp_path) if files else None)
    print(name, dict(seen))
    assert seen["again"] > 50 and seen["from the root"] > 20
    assert seen["stored"] or "host_memory" not in KINDS[name].options


def matches(server: ToyServer, req, tokens) -> tuple[int, int]:
    """Blocks that the tokens hit, and number of keys that were compared."""
    params = MatchPrefixParams(key=RadixKey(array("q", tokens), None), req=req)
    with mock.patch.object(BlockKey, "match_at", autospec=True, side_effect=BlockKey.match_at) as compare:
        return server.tree.match_prefix(params).device_prefix_len // P, compare.call_count


def test_only_changed_path_is_compared_again():
    server, req = ToyServer(high="k4v4", window=0), SimpleNamespace(session=None)
    prompt = [*range(4 * P), 1]
    for blocks in (1, 2):
        server.finish(server.admit([*prompt[: blocks * P], 7]))
    assert matches(server, req, prompt) == (2, 2)
    assert matches(server, req, prompt) == (2, 0)
    assert matches(server, req, [*prompt, 8, 9]) == (2, 0)  # after a retraction
    server.finish(server.admit([*prompt[: 3 * P], 7]))
    assert matches(server, req, prompt) == (3, 3)
    server.finish(server.admit([*prompt[: 2 * P], *range(P), 7]))  # a sibling of the last node
    assert matches(server, req, prompt) == (3, 0)
    server.finish(server.admit([*prompt[: 2 * P], 7]))
    assert matches(server, req, prompt[: 2 * P + 1])[0] == 2  # shorter than the last match
    assert matches(server, req, [*prompt[:P], *range(900, 900 + P), 1])[0] == 1  # other tokens
    assert matches(server, req, prompt)[0] == 3
    server.tree.evict(EvictParams(num_tokens=10**9))
    assert matches(server, req, prompt) == (0, 0)


def test_path_with_node_without_blocks_is_matched_from_root():
    """SGLang's match ends before a node that has lost its blocks but is still locked."""
    server, req = ToyServer(high="k4v4", window=0), SimpleNamespace(session=None)
    prompt = [*range(3 * P), 1]
    for blocks in (1, 2, 3):
        server.finish(server.admit([*prompt[: blocks * P], 7]))
    assert matches(server, req, prompt) == (3, 3)
    middle = server.tree.tree_core.node_by_id(req.kvc_match_end).parent
    with mock.patch.object(middle.component(FULL), "value", None):
        assert matches(server, req, prompt) == (1, 1)
