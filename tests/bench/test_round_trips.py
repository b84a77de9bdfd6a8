"""The round-trip benchmark: when answers count as equal, and what its scores compare."""

from types import SimpleNamespace

import pytest

from bench.quality import round_trips
from bench.quality.asking import CellError
from bench.quality.tasks import Context, Question

WORK = SimpleNamespace(contexts={"niah": [Context("c", (1,), tuple(Question((2,), str(i)) for i in range(4)))]})


def phase(*texts: str, hits: int = 64) -> dict:
    return {"niah": [SimpleNamespace(text=t, ids=list(t.encode()), cached_tokens=hits) for t in texts]}


def rows(**phases: dict) -> dict:
    return {n: round_trips.compare(p, phases.get(round_trips.BEFORE.get(n)), WORK) for n, p in phases.items()}


def test_scores_count_equal_answers_and_lost_points():
    warm, worse = phase("0", "1", "2", "x"), phase("0", "1", "x", "x")
    got = rows(
        cold=warm, warm=warm, host=warm, disk=phase("0", "1", "2", "y"), before_demotion=warm, demoted=worse,
        demoted_host=worse, floor=phase("0", "x", "x", "x"),
    )  # fmt: skip
    assert got["demoted"]["niah"] | {"marks": None} == {"right": 2, "of": 4, "marks": None, "equal": 3, "same_hits": 4}
    scores = round_trips.scores(got)
    assert scores["agents.round_trips_equal"].value == pytest.approx(11 / 12)
    assert scores["agents.demoted_points"].value == pytest.approx(25)


def test_prompt_with_fewer_hits_is_counted():
    got = rows(warm=phase("0", "1", "2", "3"), host=phase("0", "1", "2", "3", hits=0))
    assert got["host"]["niah"]["equal"] == 4 and got["host"]["niah"]["same_hits"] == 0


def test_eviction_and_demotion_end_when_all_blocks_have_moved():
    begun = {"evicted_blocks": 5, "demoted_blocks": 2, "packed_tokens": 640, "block": 64, "blocks_by_format": {"a": 10}}
    assert not round_trips.evicted(begun, begun | {"evicted_blocks": 14})
    assert round_trips.evicted(begun, begun | {"evicted_blocks": 15})
    assert not round_trips.demoted(begun, begun | {"demoted_blocks": 11})
    assert round_trips.demoted(begun, begun | {"demoted_blocks": 12})
    with pytest.raises(CellError, match="evicted before"):
        round_trips.demoted(begun, begun | {"demoted_blocks": 12, "evicted_blocks": 6})
