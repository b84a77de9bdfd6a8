"""The first-token benchmark: its prompts, and correct accounting of waits and hits."""

import random
from itertools import islice
from types import SimpleNamespace

import pytest

from bench import common
from bench.e2e import first_token

SMALL = ["--model", "none", "--input", "256", "--times", "8", "--pause", "0.02"]


class Clock:
    """Stands in for `time`; only sleeping takes time."""

    now = 0.0

    def sleep(self, seconds):
        self.now += seconds

    def monotonic(self):
        return self.now


CLOCK = Clock()


@pytest.fixture(autouse=True)
def _clock(monkeypatch):
    monkeypatch.setattr(first_token, "time", CLOCK)


class Cache:
    """Keeps every whole prompt until it is flushed; a miss takes 5 ms longer, and `slow` is added to every request."""

    def __init__(self, slow=0.0, log=None):
        self.kept, self.flushed, self.slow, self.log = [], 0, slow, log

    def flush(self):
        self.kept, self.flushed = [], self.flushed + 1

    def generate(self, ids, new):
        assert new == 1
        hits = [n for old in self.kept for n in (256, 260) if old[:n] == ids[:n] and len(ids) >= n]
        self.kept.append(ids)
        CLOCK.sleep(self.slow + (0 if hits else 0.005))
        if self.log is not None:
            self.log.append(self)
        return SimpleNamespace(cached_tokens=max(hits, default=0))


def test_prompts_of_each_kind_share_expected_prefixes():
    kinds = {k: list(islice(first_token.prompts(k, 256, random.Random(1)), 3)) for k in first_token.KINDS}
    lengths = {k: {len(p) for p in prompts} for k, prompts in kinds.items()}
    assert lengths == {"computed": {256}, "computed_padded": {512}, "cached": {260}, "appended": {384}}
    assert kinds["cached"][0] == kinds["cached"][2]
    assert len({tuple(p[:260]) for p in kinds["appended"]}) == 1 and len({tuple(p) for p in kinds["appended"]}) == 3
    assert len({tuple(p[:128]) for p in kinds["computed"]}) == 3


def test_servers_take_turns():
    args, log = first_token.arguments(SMALL), []
    one, two = Cache(log=log), Cache(log=log)
    rows = first_token.measure({"bf16": one, "kvc_k4v4": two}, "cached", args)
    assert set(rows) == {f"{n}.cached.{when}" for n in ("bf16", "kvc_k4v4") for when in ("at_once", "pause")}
    assert [len(r) for r in rows["bf16.cached.pause"]["rounds"]] == [2] * first_token.ROUNDS
    order = [client for client, before in zip(log, [None, *log]) if client is not before]
    # Both fill their caches; then each round begins with the server that ended the previous one.
    assert order == [one, two, one, two, one, two, one] and one.flushed == two.flushed == 1


def measured(slow):
    clients = {"bf16": Cache(0.004), "bf16_flashinfer": Cache(0.008), "kvc_k4v4": Cache(slow)}
    rows = {}
    for kind in first_token.KINDS:
        rows |= first_token.measure(clients, kind, first_token.arguments(SMALL))
    options = {"bf16": ["--attention-backend", "fa3"], "bf16_flashinfer": ["--attention-backend", "flashinfer"]}
    return {name: row | {"options": options.get(name.split(".")[0], [])} for name, row in rows.items()}


def test_scores_compare_waits_and_hits(monkeypatch):
    args, rows = first_token.arguments(SMALL), measured(0.002)
    assert rows["bf16.computed.at_once"]["cached_tokens"] == 0 and rows["bf16.appended.at_once"]["cached_tokens"] == 260
    # The time excludes the pause itself.
    assert rows["bf16.computed.pause"]["ms_median"] > 8.9 > rows["kvc_k4v4.cached.pause"]["ms_median"]
    assert first_token.scores(rows, args) == {}  # there are no scores without a GPU
    monkeypatch.setattr(common, "has_gpu", lambda: True)
    scores = first_token.scores(rows, args)
    assert len(scores) == 8
    score = scores["e2e.first_token.cached_at_once_vs_bf16"]
    assert score.value < 0.9 and score.low <= score.value <= score.high and score.n == 8
    assert score.baseline == "stock bf16, fa3" and score.unit.endswith("260 tokens")
    assert scores["e2e.first_token.computed_padded_vs_bf16"].unit.endswith("512 tokens")
    assert len(first_token.table(rows).splitlines()) == 1 + len(rows)
    assert first_token.scores(rows, first_token.arguments([*SMALL, "--no-prefill-graphs"])) == {}
