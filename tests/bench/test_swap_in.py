"""Arithmetic of `bench.serve.swap_in`."""

import pytest

from bench.serve.swap_in import PAUSE, extra_seconds, steps_between


def test_whole_steps_of_an_interval():
    times = [0.0, 0.01, 0.02, 0.03, 0.04]
    assert steps_between(times, 0.005, 0.035) == (2, pytest.approx(0.02))
    assert steps_between(times, 0.0, 0.04) == (4, pytest.approx(0.04))
    assert steps_between(times, 0.011, 0.019) == (0, 0.0)
    assert steps_between(times, 0.011, 0.021) == (0, 0.0)
    assert steps_between([], 0.0, 1.0) == (0, 0.0)


def test_slower_steps_take_extra_seconds():
    begin, usual, slow = 10.0, 0.010, 0.011
    times = [begin - usual * i for i in range(int(PAUSE / usual), 0, -1)] + [begin + slow * i for i in range(10)]
    assert extra_seconds(times, begin, begin + 0.1) == pytest.approx(9 * (slow - usual))
    assert extra_seconds(times, begin + 1, begin + 2) == 0.0
