"""Guarantees of `conftest.py` for every test: the same draws in each run, and no deadline."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import settings

from .conftest import FailuresAtOnce, pytest_collection_modifyitems, pytest_configure, seed_generators


@pytest.fixture(scope="module")
def early() -> float:
    return torch.rand(()).item()


def draw() -> tuple[float, float, float]:
    return random.random(), np.random.rand(), torch.rand(()).item()


def test_seed_follows_from_test_name(early, request):
    """Fixtures of every scope draw after the seeding: `early` has torch's first number."""
    first = early, *draw()
    seed_generators(request.node.nodeid)
    assert first == (torch.rand(()).item(), *draw())


def test_properties_have_fixed_examples_and_no_deadline():
    assert settings.default.derandomize and settings.default.deadline is None


@pytest.mark.parametrize(
    ("switch", "args"), [("0", ["tests/x/test_interpret.py::test_a", "tests/x"]), ("1", ["tests/x/test_reference.py"])]
)
def test_run_that_needs_both_kinds_of_process_is_rejected(switch, args, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", switch)
    with pytest.raises(pytest.UsageError, match="Triton's interpreter"):
        pytest_configure(SimpleNamespace(args=args, option=SimpleNamespace(markexpr="")))


def test_failure_is_printed_when_it_happens(capsys):
    report = SimpleNamespace(failed=True, nodeid="tests/x.py::test_a", longreprtext="E  assert 1 == 2")
    FailuresAtOnce().pytest_runtest_logreport(report)
    assert capsys.readouterr().out == "\ntests/x.py::test_a\nE  assert 1 == 2\n"


@pytest.mark.cpu_only
@pytest.mark.parametrize("gpu", [True, False])
def test_what_only_a_cpu_can_run_is_skipped_beside_a_gpu(gpu, request, monkeypatch):
    added = []
    item = SimpleNamespace(
        path=request.path, get_closest_marker=request.node.get_closest_marker, add_marker=added.append
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    pytest_collection_modifyitems([item])
    assert [mark.args[0] for mark in added if mark.name == "skipif"] == [gpu]
