"""Random workloads under SGLang's overlap schedule; every forward checks every row that is read."""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from kvc_kernels.ops import ScoreSampling
from sglang_kvc.adapter.request_limits import longest_request
from sglang_kvc.cache import replanning, thinning
from sglang_kvc.cache.one_shot import Budget
from sglang_kvc.options.config import REUSE
from sglang_kvc.options.request_hints import DONE, STEPS, TTL
from sglang_kvc.options.request_quality import LOSSLESS, is_one_shot

from .audit import check_files, check_tree
from .model import CONTEXT, P, make_runtime
from .overlap import Overlap, configured

LIVES = int(os.environ.get("KVC_LIVES", "1"))  # runs of each kind, each with its own seed
MORE = 20  # maximum number of additional runs
# Forwards from one check of all rows that are read to the next. A wrong row stays until its block is freed, and checks
# take nine tenths of the time.
CHECK_EVERY = 1 if "KVC_LIVES" in os.environ else 3
TURNS = 100
ONE_SHOT = ("one-shot:3x", "one-shot:72", "one-shot:64x")
HINTS = ({}, {}, {DONE: True}, {TTL: 0}, {TTL: 0.02}, {TTL: 60, STEPS: 2}, {STEPS: 0}, {STEPS: 3})


class Client:
    """Sends prompts that share prefixes and answers, aborts some, and pauses at times; all drawn from one seed."""

    answers: tuple[int, ...] = (1, P - 1, P, P + 1, 2 * P, 3 * P)  # tokens

    def __init__(self, server: Overlap, seed: int, levels: tuple[str | None, ...]):
        self.server, self.draw, self.levels = server, random.Random(seed), levels
        self.hints = server.runtime.config.eviction == REUSE
        self.pieces: list[int] = []

    def act(self) -> None:
        draw, server = self.draw, self.server
        if len(server.waiting_queue) < 4 and draw.random() < 0.4:
            self.submit()
        live = [r for r in server.requests.values() if not r.finished()]
        if live and draw.random() < 0.01:
            server.abort(draw.choice(live).rid)
        if server.chunked_req is not None and draw.random() < 0.05:
            server.abort(server.chunked_req.rid)
        if draw.random() < 0.01:
            server.pause()
        if draw.random() < (0.02 if server.runtime.host_tier is None else 0.2):
            server.tree_cache.evict(EvictParams(num_tokens=draw.randint(1, 3) * P))
        if server.runtime.demotion.enabled and draw.random() < 0.05:
            server.demote_running(draw.randint(1, 3) * P)

    def submit(self) -> None:
        draw, runtime, level = self.draw, self.server.runtime, self.draw.choice(self.levels)
        one_shot = is_one_shot(level)
        format_id = runtime.policy.format_id_of(None if one_shot else level)
        budget = Budget.parse(level) if one_shot else None
        longest = min(longest_request(runtime, format_id, budget), self.server.context - 1)
        # The pieces of the last prompt may stay: neighbors then compute the same blocks, and one copy is dropped.
        if draw.random() < 0.6:
            # Some are longer than all memory could hold uncompressed.
            self.pieces = [draw.randint(0, 2) for _ in range(draw.randint(0, draw.choice([3, 3, 3, longest // P])))]
        prompt = [100 * piece + j for piece in self.pieces for j in range(P)]
        prompt += [7] * draw.choice([0, 1, 5, 20, P - 1])
        if one_shot:  # long enough to drop whole blocks
            prompt = [9] * 2 * P + prompt
        prompt = (prompt or [3])[: longest - 2]
        longest = min(longest_request(runtime, format_id, budget, len(prompt)), longest)
        kind = draw.choice([0, 0, len(self.server.requests)])  # answers shared with other requests, or unique ones
        new_tokens = min(draw.choice(self.answers), longest - len(prompt) - 1)
        answer = [5000 + 200 * kind + i for i in range(new_tokens)]
        self.server.seen["longer than the pool"] += len(prompt) + new_tokens > runtime.sizing.capacity_tokens
        salt = draw.choice([None, None, None, "tenant"])
        hints = draw.choice(HINTS) if self.hints else {}
        self.server.submit(prompt, answer, level, salt, hints)


def life(seed: int, kind: Kind, disk: str | None = None) -> Counter:
    """Run one server from its start until all requests are answered. Returns how often each event happened."""
    runtime = make_runtime(**kind.options, **({"disk": disk} if disk else {}))
    runtime.decodes_as_extend = kind.dp
    with configured(runtime, kind.chunk, retract_every=20, mixed=kind.mixed, strip=kind.strip, interval=kind.interval):
        server = Overlap(runtime, kind.chunk, kind.disable, kind.order, kind.context)
        server.check_every = CHECK_EVERY
        client = Client(server, seed, kind.levels)
        for turn in range(TURNS):
            client.act()
            if turn == TURNS // 2:
                server.pause()
            server.turn()
        for _ in range(10 * (1 + kind.interval) * TURNS):  # some of an interval have no forward
            if not server.busy:
                break
            server.turn()
        assert not server.busy, "requests wait for ever"
        server.turn()  # idle: settles
        assert not runtime.unsettled
        check_tree(server)
        server.seen["evicted"] = runtime.counters.evicted_blocks
        server.seen["saved"] = runtime.host_tier.saved_blocks if runtime.host_tier else 0
        if disk:
            server.seen["written"], server.seen["read"] = check_files(server)
        server.tree_cache.evict(EvictParams(num_tokens=10**9))
        assert server.token_to_kv_pool_allocator.used_slots() == 0
        assert runtime.capacity.available_tokens() == runtime.sizing.capacity_tokens
        assert server.req_to_token_pool.available_size() == server.req_to_token_pool.size
    return server.seen


@dataclass(frozen=True)
class Kind:
    """A kind of server and the requests of its clients."""

    options: dict
    chunk: int | None = 2 * P
    levels: tuple[str | None, ...] = (None,)
    disable: bool = False  # disables the radix cache
    mixed: bool = False  # decode steps join prefills
    dp: bool = False  # decode steps run as extends, as with DP attention
    strip: bool = False  # answers with thoughts leave the cache
    interval: int = 0  # decode steps between two chunks (`--prefill-decode-interval`)
    order: str = "fcfs"  # order of admission
    context: int = CONTEXT  # tokens of the longest request
    segment: int = thinning.SEGMENT  # blocks of a segment of a one-shot prompt
    servers: int = 0  # servers one after the other that share a folder of files


TIGHT = {"blocks": 7}  # uncompressed
LEANKV = {"policy": "leankv", "high": "k8v4", "low": "k4v2"}
LADDER = {"high": "k8v4", "floor": "k2v2", "page_bytes": 1280, "window": 0}  # 4, 2, 2 and 1 pages per head
ANSWERS = {"policy": "prune", "high": "k8v4", "scorer": "h2o", "keep": 0.4, "window": 32, "lag": P}
LAST = {**ANSWERS, "scorer": "snapkv:window=16", "lag": 0}
HOST = {"host_memory": 200_000}  # a dozen packed blocks
LONG = {"context": 4096, "segment": 2}
KINDS = {
    "host": Kind({"high": "k4v4", "window": 0, **TIGHT, **HOST}, levels=(None, LOSSLESS)),
    "host-window": Kind({"high": "k8v4", "window": P, **TIGHT, "host_memory": 60_000}, P),
    "host-levels": Kind({"high": "k4v4", "levels": ("k8v8",), "window": 0, **TIGHT, **HOST}, P, (None, "k8v8")),
    "host-leankv": Kind({**LEANKV, "window": 0, **TIGHT, **HOST}, P, (None, LOSSLESS)),
    "host-private": Kind({**LEANKV, "window": 0, "trust": "salt", **TIGHT, **HOST}, P),
    "host-quota": Kind({"policy": "quota", "keep": 0.5, **TIGHT, **HOST}, P),
    "disk": Kind({"high": "k4v4", "window": 0, **TIGHT, "host_memory": 60_000}, levels=(None, LOSSLESS), servers=2),
    "disk-leankv": Kind({**LEANKV, "window": P, **TIGHT, "host_memory": 80_000}, P, servers=2),
    "host-mixed": Kind({"high": "k4v4", "window": 0, **TIGHT, **HOST}, mixed=True),
    "reuse": Kind({"high": "k4v4", "window": 0, "eviction": REUSE, **TIGHT}, P, (None, LOSSLESS)),
    "host-reuse": Kind({"high": "k4v4", "window": 0, "eviction": REUSE, **TIGHT, "host_memory": 60_000}, order="hrrn"),
    "disk-reuse": Kind(
        {"high": "k4v4", "window": 0, "eviction": REUSE, **TIGHT, "host_memory": 60_000}, P, servers=2
    ),
    "k4v4": Kind({"high": "k4v4", "window": 0}, levels=(None, LOSSLESS)),
    "k4v4-tight": Kind({"high": "k4v4", "window": 0, "levels": ("k2v2",), **TIGHT}, P, (None, LOSSLESS, "k2v2")),
    "window": Kind({"high": "k4v4", "window": 32}, P),
    "window-tight": Kind({"high": "k8v4", "window": 2 * P, **TIGHT}),
    "levels": Kind({"high": "k4v4", "levels": ("k8v4",), "window": 0}, None, (None, "k8v4")),
    "leankv": Kind({**LEANKV, "window": 0}, levels=(None, LOSSLESS)),
    "leankv-tight": Kind({**LEANKV, **TIGHT}, P, (None, LOSSLESS)),
    "leankv-private": Kind({**LEANKV, "window": 0, "trust": "salt"}, P, (None, LOSSLESS)),
    "quota": Kind({"policy": "quota", "keep": 0.5}, P),
    "two-tiers": Kind({"policy": "prune", "share": "ada", "low": "k2v2"}),
    "h2o-tight": Kind({**ANSWERS, "lag": 0, **TIGHT, **HOST}, P, (None, LOSSLESS)),
    "h2o-two-bits": Kind({**ANSWERS, "high": "k2v2", "lag": 0, **TIGHT, **HOST}, P, mixed=True),
    "arkv-tight": Kind({**ANSWERS, "policy": "arkv", "low": "k2v2", "share": "ada", "lag": 0, **TIGHT}, P, mixed=True),
    "last-queries": Kind({**LAST, **TIGHT, **HOST}, P, (None, LOSSLESS)),
    "last-queries-mixed": Kind({**LAST, "scorer": "kv-compress", "lag": P, **TIGHT}, P, mixed=True),
    "last-queries-disk": Kind(
        {**LEANKV, "observe": ScoreSampling(32), "window": 0, **TIGHT, "host_memory": 80_000}, P, servers=2
    ),
    "answers": Kind(ANSWERS, levels=(None, LOSSLESS)),
    "answers-tight": Kind({**ANSWERS, "window": 0, **TIGHT}, P),
    "answers-host": Kind({**ANSWERS, "share": "ada", **TIGHT, **HOST}, P),
    "answers-disk": Kind({**ANSWERS, **TIGHT, "host_memory": 80_000}, P, servers=2),
    "answers-private": Kind({**ANSWERS, "trust": "salt", **TIGHT}, P),
    "answers-mixed": Kind({**ANSWERS, **TIGHT}, P, mixed=True),
    "answers-no-radix": Kind(ANSWERS, P, disable=True),
    "leankv-lag": Kind({**LEANKV, "window": 0, "lag": P}, levels=(None, LOSSLESS)),
    "leankv-lag-tight": Kind({**LEANKV, "window": 32, "lag": 2 * P, **TIGHT, **HOST}, P, mixed=True),
    "bf16-tight": Kind({"high": "bf16", **TIGHT}, None),
    "floor": Kind({**LADDER, **TIGHT}, levels=(None, LOSSLESS, "k8v4")),
    "floor-window": Kind({**LADDER, "window": P, **TIGHT}, P),
    "floor-levels": Kind({**LADDER, "levels": ("k4v4",), **TIGHT}, P, (None, "k8v4", "k4v4")),
    "floor-host": Kind({**LADDER, **TIGHT, **HOST}, P, (None, LOSSLESS, "k8v4")),
    "floor-disk": Kind({**LADDER, **TIGHT, "host_memory": 60_000}, levels=(None, "k8v4"), servers=2),
    "floor-mixed": Kind({**LADDER, "floor": "k4v4", **TIGHT}, P, mixed=True),
    "no-radix": Kind({"high": "k4v4", "window": 0}, disable=True),
    "one-shot": Kind({"high": "k4v4", "window": 0, "blocks": 9}, levels=(None, None, None, *ONE_SHOT)),
    "one-shot-tight": Kind({"high": "k4v4", "window": 0, "levels": ("k8v8",), **TIGHT}, P, (None, "k8v8", *ONE_SHOT)),
    "one-shot-whole": Kind({"high": "k8v4", "window": 0, **TIGHT}, None, (None, LOSSLESS, "one-shot:64x")),
    "one-shot-host": Kind({"high": "k4v4", "window": 0, **TIGHT, **HOST}, levels=(None, None, None, *ONE_SHOT)),
    "one-shot-mixed": Kind({"high": "k4v4", "window": 0}, P, (None, None, None, *ONE_SHOT), mixed=True),
    "one-shot-no-radix": Kind({"high": "k4v4", "window": 0}, P, ONE_SHOT, disable=True),
    "one-shot-long": Kind({"high": "k4v4", "window": 0, **TIGHT}, P, (None, "one-shot:16x", "one-shot:70"), **LONG),
    "one-shot-long-mixed": Kind({"high": "k8v4", "window": 0, **TIGHT}, P, (None, "one-shot:8x"), mixed=True, **LONG),
    "interval": Kind({"high": "k4v4", "window": 0, **TIGHT, **HOST}, P, (None, LOSSLESS), interval=2),
    "interval-window": Kind({"high": "k8v4", "window": P, **TIGHT}, P, interval=1),
    "interval-answers": Kind({**ANSWERS, **TIGHT}, P, interval=3),
    "interval-one-shot": Kind(
        {"high": "k4v4", "window": 0, **TIGHT}, P, (None, "one-shot:16x", "one-shot:70"), interval=2, **LONG
    ),
    "strip": Kind({"high": "k4v4", "window": 0}, P, strip=True),
    "strip-leankv": Kind({**LEANKV, **TIGHT, **HOST}, P, strip=True),
    "mixed": Kind({"high": "k4v4", "window": 0}, levels=(None, LOSSLESS), mixed=True),
    "mixed-dp": Kind({"high": "k4v4", "window": 0, **TIGHT}, P, mixed=True, dp=True),
    "mixed-tight": Kind({"high": "k8v4", "window": P, **TIGHT}, P, mixed=True),
    "mixed-leankv": Kind({**LEANKV, **TIGHT}, P, (None, LOSSLESS), mixed=True),
    "mixed-no-radix": Kind({"high": "k4v4", "window": 0, **TIGHT}, P, disable=True, mixed=True),
}


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors are small, and the threads of several workers would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_random_server_lives(name, tmp_path, monkeypatch):
    """If some runs lack an expected event, more runs follow."""
    monkeypatch.setattr(replanning, "COMPETE_EVERY", 1)  # answers are short
    kind, seen = KINDS[name], Counter()
    monkeypatch.setattr(thinning, "SEGMENT", kind.segment)
    expected = _expected(name, kind)
    for seed in range(LIVES + MORE):
        if seed >= LIVES and not expected - seen.keys():
            break
        folders = [str(tmp_path)] * kind.servers or [None]
        for start, folder in enumerate(folders):
            seen += life(seed + start, kind, folder)
    print(name, dict(seen))
    assert not expected - seen.keys(), "these lives hold too little"


def _expected(name: str, kind: Kind) -> set[str]:
    """The events that must happen in the runs of a kind."""
    expected = {"retracted", "paused"}
    expected |= {"packed"} if kind.options.get("high") != "bf16" else set()
    expected |= {"chunks"} if kind.chunk else set()
    expected |= {"mixed"} if kind.mixed else set()
    expected |= {"decoded between chunks"} if kind.interval else set()
    expected |= {"demoted", "demoted while running"} if kind.options.get("floor") else set()
    scored = kind.options.get("policy") == "leankv" or kind.options.get("scorer")
    late = kind.options.get("lag") or (scored and kind.chunk)
    expected |= {"planned late"} if late and not kind.disable else set()
    expected |= {"unread", "chunks aborted"} if "last-queries" in name else set()
    expected |= {"competed"} if kind.options.get("scorer") and kind.options.get("lag") else set()
    trust = kind.options.get("trust") == "salt"
    budgets = any(map(is_one_shot, kind.levels))
    expected |= {"private"} if trust or budgets else set()
    expected |= {"one-shot", "gaps"} if budgets else set()
    expected |= {"thinned"} if kind.context > CONTEXT else set()
    expected |= {"retracted while thinned"} if kind.context > CONTEXT and not kind.mixed else set()
    expected |= {"saved", "loaded"} if kind.options.get("host_memory") and not trust else set()
    expected |= {"written", "read"} if kind.servers else set()
    return expected | (set() if kind.disable else {"hits", "hits after a retraction", "evicted"})
