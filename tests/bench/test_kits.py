"""Which of SGLang's kits run where, on how many servers, and what counts as a score."""

from argparse import Namespace

import pytest

from bench import common
from bench.serve import kits


def arguments(**changes) -> Namespace:
    return Namespace(**{"format": "k4v4", "quick": False, "block": 64, "nodes": 400, "memory": "", **changes})


def rows(failed=(), commit="now", left_out=()) -> list[dict]:
    names = [kits.KITS[n].name for n in kits.GPU_KITS if n not in left_out]
    return [{"kit": n, "passed": n not in failed, "commit": commit} for n in names]


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(common, "has_gpu", lambda: True)
    monkeypatch.setattr(common, "commit", lambda: "now")


def test_the_score_is_the_share_of_kits_that_pass():
    (name, (value, unit)), = kits.scores(arguments(), rows([kits.KITS["abort"].name])).items()  # fmt: skip
    assert (name, value) == ("kits.gpu.k4v4", 1 - 1 / len(kits.GPU_KITS)) and unit.startswith("share")


@pytest.mark.parametrize("changes", [{"quick": True}, {"block": 128}, {"nodes": 120}])
def test_no_score_with_other_numbers(changes):
    assert not kits.scores(arguments(**changes), rows())


def test_no_score_of_part_of_the_kits_or_of_two_commits(monkeypatch):
    assert not kits.scores(arguments(), rows(left_out=["retract"]))
    assert not kits.scores(arguments(), rows(commit="before"))
    monkeypatch.setattr(common, "has_gpu", lambda: False)
    assert not kits.scores(arguments(), rows())
