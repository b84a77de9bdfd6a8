"""SGLang's kits: which run on which device, on how many servers, and how they are scored."""

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


def test_score_is_share_of_passed_kits():
    (name, (value, unit)), = kits.scores(arguments(), rows([kits.KITS["abort"].name])).items()  # fmt: skip
    assert (name, value) == ("kits.gpu.k4v4", 1 - 1 / len(kits.GPU_KITS)) and unit.startswith("share")


@pytest.mark.parametrize("changes", [{"quick": True}, {"block": 128}, {"nodes": 120}])
def test_changed_settings_give_no_score(changes):
    assert not kits.scores(arguments(**changes), rows())


def test_partial_run_or_mixed_commits_give_no_score(monkeypatch):
    assert not kits.scores(arguments(), rows(left_out=["retract"]))
    assert not kits.scores(arguments(), rows(commit="before"))
    monkeypatch.setattr(common, "has_gpu", lambda: False)
    assert not kits.scores(arguments(), rows())
