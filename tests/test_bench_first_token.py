"""First tokens: what is asked, and that waits and hits are accounted as they were."""

import json
import random
import time
from itertools import islice
from types import SimpleNamespace

import pytest

from bench import common
from bench.e2e import first_token, small

SMALL = ["--model", "none", "--input", "300", "--append-tokens", "20", "--times", "4", "--pause", "0.02"]


class Cache:
    """Keeps every prompt, whole, until it is told to forget them; a miss takes 5 ms longer."""

    def __init__(self):
        self.kept, self.flushed = [], 0

    def flush(self):
        self.kept, self.flushed = [], self.flushed + 1

    def generate(self, ids, new):
        assert new == 1
        hits = [n for old in self.kept for n in (256, 261) if old[:n] == ids[:n] and len(ids) >= n]
        self.kept.append(ids)
        if not hits:
            time.sleep(0.005)
        return SimpleNamespace(cached_tokens=max(hits, default=0))


def test_prompts():
    a = first_token.arguments(SMALL)
    names = ("computed", "cached", "appended")
    kinds = {k: list(islice(first_token.prompts(k, a, random.Random(1)), 3)) for k in names}
    assert {len(p) for p in kinds["computed"] + kinds["cached"]} == {261}  # two blocks and the rest
    assert kinds["cached"][0] == kinds["cached"][2] and {len(p) for p in kinds["appended"]} == {281}
    assert len({tuple(p[:261]) for p in kinds["appended"]}) == 1 and len({tuple(p) for p in kinds["appended"]}) == 3
    assert len({tuple(p[:128]) for p in kinds["computed"]}) == 3


def test_a_server_is_measured(monkeypatch):
    a, client, rows = first_token.arguments(SMALL), Cache(), {}
    first_token.measure(client, a, rows.__setitem__)
    assert client.flushed == 3 and len(rows) == 9
    assert rows["computed.pause0"]["cached_tokens"] == 0 and len(rows["computed.pause0"]["ms"]) == 3
    assert rows["computed.pause0.02"]["ms_median"] >= 5 > rows["cached.pause0.02"]["ms_median"]  # without the pause
    assert rows["appended.pause0"]["cached_tokens"] >= 256 and len(rows["appended.pause0"]["ms"]) == 4
    assert rows["cached.pause0"]["ms_max"] >= rows["cached.pause0"]["ms_median"]
    numbers = {f"{n}.{kind}": row for n in ("bf16", "kvc_k4v4") for kind, row in rows.items()}
    assert first_token.scores(numbers, a) == {}  # no GPU here
    monkeypatch.setattr(common, "has_gpu", lambda: True)
    found = first_token.scores(numbers, a)
    assert len(found) == 6 and found["e2e.first_token.cached_vs_bf16"][0] == pytest.approx(1)
    assert len(first_token.table(numbers).splitlines()) == 19
    assert first_token.scores(numbers, first_token.arguments([*SMALL, "--no-prefill-graphs"])) == {}
    assert list(small.servers(a)) == ["bf16", "kvc_k4v4"] and json.dumps(small.servers(a))
    monkeypatch.setattr(common, "has_gpu", lambda: False)
    assert list(small.servers(a)) == ["bf16", "kvc_k4v4"]
    assert list(small.servers(first_token.arguments([*SMALL, "--only", "kvc_k4v4"]))) == ["kvc_k4v4"]
