"""A private request whose blocks went to host memory is aborted while it is computed again from its first token."""

from __future__ import annotations

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from .audit import check_tree
from .model import P, make_runtime
from .overlap import Overlap, configured


@pytest.mark.parametrize("dropped", [False, True], ids=["stored", "first chunk dropped from host memory"])
@pytest.mark.parametrize("trust", ["salt", "all"])
def test_abort_between_chunks_drops_stored_blocks(trust, dropped):
    options = {"policy": "leankv", "high": "k8v4", "low": "k4v2", "trust": trust}
    runtime = make_runtime(blocks=20, window=0, host_memory=400_000, **options)
    with configured(runtime, 2 * P, retract_every=10**6):
        server = Overlap(runtime, 2 * P, disable=False)
        server.submit([*range(6 * P), 1], [5] * 40, None, None)
        (req,) = server.requests.values()
        assert req.kvc_private == (trust == "salt")
        while not req.output_ids:
            server.turn()
        server.pause()
        server.tree_cache.evict(EvictParams(num_tokens=10**9))
        assert runtime.host_tier.stored
        req._compute_max_prefix_len = lambda n: 0  # of a request for the log-probabilities of its whole prompt
        while server.chunked_req is None:
            server.turn()
        server.turn()
        if dropped:
            server.tree_cache.evict_host(1)
        server.abort(req.rid)
        for _ in range(4):
            server.turn()
        check_tree(server)
        if trust == "salt":
            assert not runtime.host_tier.stored and not runtime.blocks.used_count
        server.tree_cache.evict(EvictParams(num_tokens=10**9))
        server.tree_cache.evict_host(10**9)
        assert not runtime.host_tier.stored and not runtime.blocks.used_count
