"""2000 random requests to starved servers: each is answered in full, aborted or refused with a reason, and none is left
in any tier.

Each kind of server lacks something else, and must have done what this causes. The pools hold 5 to 11 uncompressed
blocks. Requests are turns of dialogues, are prefilled in chunks, aborted, paused and retracted; caches are flushed.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.runtime_context import get_parallel

from sglang_kvc.adapter.request_limits import longest_request
from sglang_kvc.options.config import REUSE
from sglang_kvc.options.request_quality import LOSSLESS

from . import record, test_starved
from .audit import check_tree
from .memory_backend import server_args
from .model import P, make_runtime
from .overlap import Overlap, configured
from .test_overlap import HINTS, LADDER
from .test_starved import BadDisk, Starved, Threads, check_released

REQUESTS = 400  # sent to the servers of one kind
SERVERS = 4  # of one kind, one after the other
ENDS = ("answered", "refused", "ended by an abort")
K4V4 = {"high": "k4v4", "window": 0}


@dataclass(frozen=True)
class Kind:
    """A kind of starved server, and the events that must happen in addition to `ALWAYS`."""

    options: dict
    expected: set[str]
    levels: tuple[str | None, ...] = (None, None, None, LOSSLESS, "nonsense")
    priorities: bool = False
    disk_size: int = 0
    blocks: int = 5  # uncompressed, of the smallest pool


ALWAYS = {*ENDS, "hits", "hits after a retraction", "turns", "chunks", "retracted", "paused", "flushed", "packed"}
KINDS = {
    "full-disk": Kind(
        {**K4V4, "host_memory": 60_000},
        {"saved", "loaded", "written", "read", "disk full"},
        disk_size=1 << 30,
    ),
    "floor": Kind({**LADDER}, {"demoted", "evicted"}, (None, None, None, "k8v4", LOSSLESS, "nonsense")),
    "one-shot": Kind(
        {**K4V4, "host_memory": 60_000}, {"one-shot", "gaps", "private", "saved", "loaded"},
        (None, None, "one-shot:16x", "one-shot:16x", "nonsense"),
        blocks=9,  # shorter one-shot prompts keep all blocks
    ),
    "reuse": Kind(
        {**K4V4, "eviction": REUSE, "host_memory": 30_000, "running_share": 0.5}, {"saved", "loaded", "evicted"},
    ),
    "priorities": Kind({**LADDER, "host_memory": 60_000}, {"preempted", "saved", "loaded", "demoted"}, priorities=True),
}  # fmt: skip
assert REQUESTS * len(KINDS) >= 2000


class FullDisk(BadDisk):
    """A disk without space for more than `room` bytes of files."""

    room = 40_000
    full = 0  # number of writes that found no space

    def _write_file(self, *args) -> bool:
        if self.num_bytes > FullDisk.room:
            FullDisk.full += 1
            raise OSError(28, "No space left on device")
        return super()._write_file(*args)


class Dialogues(Starved):
    """A client that also continues requests that were answered at the server's own quality."""

    answers = (1, 4, 16, P + 1)

    def __init__(self, server: Overlap, seed: int, kind: Kind, threads: list[Threads]):
        super().__init__(server, seed, threads)
        self.levels = kind.levels

    def submit(self) -> None:
        server, draw = self.server, self.draw
        ended = [r for r in server.requests.values() if r.finished() and r.output_ids and r.extra_key is None]
        if not ended or draw.random() < 0.6:
            return super().submit()
        last = draw.choice(ended[-4:])
        prompt = [*last.origin_input_ids, *last.output_ids, *range(7, 7 + draw.randint(1, P))]
        room = min(longest_request(server.runtime, 1), server.context - 1) - len(prompt) - 1
        if room < 1:
            return super().submit()
        answer = [5000 + 200 * len(server.requests) + i for i in range(min(draw.choice(self.answers), room))]
        server.submit(prompt, answer, None, None, draw.choice(HINTS) if self.hints else {})
        server.seen["turns"] += 1


def life(seed: int, kind: Kind, folder: Path, requests: int) -> Counter:
    """Run a server until `requests` requests have been sent and have ended."""
    disk = {"disk": str(folder), "disk_size": kind.disk_size} if kind.disk_size else {}
    runtime, chunk = make_runtime(blocks=kind.blocks + seed % 3, **kind.options, **disk), P * (1 + seed % 2)
    runtime.weights = lambda: bytes([record.weights])
    rank = get_parallel().override(tp_rank=0, tp_size=1)
    with rank, configured(runtime, chunk, retract_every=25, mixed=seed % 4 == 3), contextlib.ExitStack() as stack:
        server, threads = Overlap(runtime, chunk, disable=False, server_args=server_args("")), []
        server.check_every = 8
        client = Dialogues(server, seed, kind, threads)
        if kind.priorities:
            server.schedule_by_priority()
            stack.enter_context(get_parallel().override(pp_max_micro_batch_size=2))  # rows
            stack.enter_context(patch.object(PrefillAdder, "preempt_to_schedule", _counted(server)))
        if kind.disk_size:
            tier = server.tree_cache.disk
            tier.store.__class__, tier.store.draw = FullDisk, client.draw
            tier._readers, tier._writers, tier._lookup_thread = threads[:] = [Threads(client.draw) for _ in range(3)]
        for name in ("cache.disk_tier", "adapter.tree_disk"):
            stack.enter_context(patch(f"sglang_kvc.{name}.wait", partial(test_starved._wait, threads)))
        for share in (2, 1):
            while len(server.requests) < requests // share:
                client.act()
                server.turn()
            test_starved._finish(server, threads, turns=3000)
            client.check_answers()
            check_tree(server)
            if share == 2:
                client.flush()
        server.seen["evicted"] = runtime.counters.evicted_blocks
        check_released(server, files=kind.disk_size > 0)
    server.seen["retracted"] -= server.seen["preempted"]  # counted separately
    return server.seen


def _counted(server: Overlap):
    preempt = PrefillAdder.preempt_to_schedule

    def counting(adder, req) -> bool:
        before = len(adder.preempt_list)
        made_room = preempt(adder, req)
        server.seen["preempted"] += len(adder.preempt_list) - before
        return made_room

    return counting


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_2000_requests_end_on_starved_servers(name, tmp_path, monkeypatch):
    monkeypatch.setattr(record, "weights", 0)
    monkeypatch.setattr(FullDisk, "full", 0)
    kind, seen = KINDS[name], Counter()
    for seed in range(SERVERS):
        seen += life(seed, kind, tmp_path, REQUESTS // SERVERS)
    seen["disk full"] = FullDisk.full
    print(name, dict(seen))
    assert sum(seen[end] for end in ENDS) >= REQUESTS, "too few requests ended"
    assert not {event for event in ALWAYS | kind.expected if seen[event] <= 0}, "these servers did too little"
