"""Two ranks with `--kvc-floor` and a disk, of which one failed to write blocks before they were demoted."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_kvc.cache.disk_store import DiskStore

from .model import P
from .overlap import Overlap
from .test_starved import Peer, run_ranks
from .test_stored_prompts import EVERYTHING, serve, tokens

LADDER = {"high": "k8v4", "floor": "k2v2", "page_bytes": 1280}


def turns(server: Overlap, peer: Peer) -> None:
    """Run both servers until neither is busy and all writes have ended."""
    tree, disk = server.tree_cache, server.tree_cache.disk
    for _ in range(2000):
        under_way = server.busy or tree.ongoing_prefetch or tree.loads or disk._waiting or disk._writing
        if not any(peer.both("the loop", bool(under_way))):
            return
        server.turn()
        time.sleep(0.001)
    raise AssertionError("a server stays busy")


def rank(number: int, pipe, folder: str) -> None:
    torch.set_num_threads(1)
    peer, files, prompt = Peer(pipe), Path(folder) / str(number), tokens(1, 4)
    write = DiskStore._write_file

    def full(*args):
        raise OSError(28, "No space left on device")

    with serve(files, blocks=20, **LADDER) as server:
        peer.join(server)
        tree, runtime = server.tree_cache, server.runtime
        DiskStore._write_file = full if number else write
        server.submit([*prompt, 1], [5], None, None)
        turns(server, peer)
        DiskStore._write_file = write
        tree.evict_host(10**9)
        (node,) = tree.root_node.children.values()
        blocks = tree.component.blocks_of(node)
        while runtime.demotion.tier_of(blocks) == 1:
            runtime.demotion.demote(blocks, 10**6)
        tree.evict(EVERYTHING)
        turns(server, peer)
        sizes = {path.stat().st_size for path in files.rglob("*.kvc")}
        a, b = peer.both("the files", sorted(sizes))
        assert a != b and a and b
    for _ in range(2):  # the second server finds what the first one wrote again
        with serve(files, blocks=20, **LADDER) as server:
            peer.join(server)  # compares the ledgers after each turn
            server.submit([*prompt, 1], [6], None, None)
            turns(server, peer)
            local, remote = peer.both("the formats", server.runtime.blocks.format_id.tolist())
            assert local == remote
            for number_of_prompt in range(6):  # a shortage demotes or evicts
                server.submit([*tokens(10 + number_of_prompt, 6), 1], [7] * 3, None, None)
                turns(server, peer)
            server.tree_cache.evict(EvictParams(num_tokens=2 * P))
            turns(server, peer)


def test_ranks_skip_records_with_different_formats(tmp_path):
    run_ranks(rank, str(tmp_path))
