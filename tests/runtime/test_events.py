"""KV events for cache-aware routers: each block that the tree stores or drops, by a hash of its prefix."""

from __future__ import annotations

from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from .model import P, ToyServer


def stored(events: list) -> dict[int, tuple[int | None, list[int]]]:
    """A map from hash to (hash of the preceding block, token ids), as a router keeps it."""
    out: dict[int, tuple[int | None, list[int]]] = {}
    for event in events:
        if isinstance(event, BlockStored):
            parent = event.parent_block_hash
            for i, block in enumerate(event.block_hashes):
                out[block] = parent, list(event.token_ids[i * P : (i + 1) * P])
                parent = block
            assert event.block_size == P
    return out


def prefixes(blocks: dict) -> set[tuple[int, ...]]:
    """The token sequence that ends with each block."""

    def tokens(block) -> tuple[int, ...]:
        parent, block_tokens = blocks[block]
        return (tokens(parent) if parent is not None else ()) + tuple(block_tokens)

    return {tokens(block) for block in blocks}


def test_router_learns_of_stored_and_dropped_blocks():
    server = ToyServer(high="k4v4", window=0, blocks=12, tree={"enable_kv_cache_events": True})
    server.tree.take_events()
    first = list(range(3 * P))
    second = [*first[:P], *range(9000, 9000 + P)]
    known: dict = {}
    for tokens in (first, second):
        server.finish(server.admit([*tokens, 1]))
        known |= stored(server.tree.take_events())
    expected = {tuple(first[: n * P]) for n in (1, 2, 3)} | {tuple(second)}
    assert prefixes(known) == expected

    with server.runtime.capacity.exact_need(server.allocator.available_size() + P):
        server.tree.evict(EvictParams(num_tokens=P))
    removed = [b for e in server.tree.take_events() if isinstance(e, BlockRemoved) for b in e.block_hashes]
    assert removed and set(removed) < set(known)
    removed_prefixes = prefixes(known) - prefixes({b: known[b] for b in known if b not in removed})
    assert all(any(p[: len(g)] == g for p in expected) for g in removed_prefixes)

    server.tree.reset()
    assert any(isinstance(e, AllBlocksCleared) for e in server.tree.take_events())


def test_packed_block_is_announced_once():
    """Packing changes a block in place and sends no event to routers."""
    server = ToyServer(high="k4v4", window=0, blocks=12, tree={"enable_kv_cache_events": True})
    req = server.admit([*range(2 * P), 1])
    server.tree.take_events()
    server.finish(req)
    server.runtime.flush()
    assert not [e for e in server.tree.take_events() if isinstance(e, BlockStored)]
