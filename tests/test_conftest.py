"""What `conftest.py` promises of every test: the same draws in each run, and no deadline."""

import random

import numpy as np
import pytest
import torch
from hypothesis import settings

from .conftest import seed_generators


@pytest.fixture(scope="module")
def early() -> float:
    return torch.rand(()).item()


def draw() -> tuple[float, float, float]:
    return random.random(), np.random.rand(), torch.rand(()).item()


def test_draws_follow_from_the_name_of_the_test(early, request):
    """Fixtures of every scope draw after the seeding: `early` has torch's first number."""
    first = early, *draw()
    seed_generators(request.node.nodeid)
    assert first == (torch.rand(()).item(), *draw())


def test_properties_have_fixed_examples_and_no_deadline():
    assert settings.default.derandomize and settings.default.deadline is None
