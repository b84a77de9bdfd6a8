"""Arithmetic of `bench.serve.swap_in`."""

import pytest

from bench.serve.swap_in import PAUSE, extra_seconds, median_steps, steps_between


def test_steps_of_an_interval():
    times = [0.0, 0.01, 0.02, 0.03, 0.04]
    assert steps_between(times, 0.005, 0.035) == (3, pytest.approx(0.03))
    assert steps_between(times, 0.0, 0.04) == (4, pytest.approx(0.04))
    assert steps_between(times, 0.011, 0.019) == (0, 0.0)
    assert steps_between(times, 0.011, 0.021) == (1, pytest.approx(0.01))
    assert steps_between(times, -1.0, 0.021) == (0, 0.0)
    assert steps_between([], 0.0, 1.0) == (0, 0.0)


@pytest.mark.parametrize("late", [0, 3])
def test_slower_steps_take_extra_seconds(late):
    """Of the first tokens, `late` arrive together with the next one."""
    begin, usual, slow = 10.0, 0.010, 0.011
    before = [begin - usual * i for i in range(int(PAUSE / usual), 0, -1)]
    during = [begin + slow * i for i in range(10)]
    during[:late] = [during[late]] * late
    assert extra_seconds(before + during, begin - 0.001, begin + 0.1) == pytest.approx(9 * (slow - usual))
    with pytest.raises(RuntimeError, match="no decode step"):
        extra_seconds(before + during, begin + 1, begin + 2)


def test_median_steps_follow_each_request():
    """Requests without a token before them or with too few steps after them do not count."""
    times = [0.0, 1.0, 3.0, 4.0, 5.0, 7.0, 10.0]
    assert median_steps(times, [0.5, 3.5], 2) == [pytest.approx(1000), pytest.approx(1500)]
    assert median_steps(times, [-1.0, 0.5, 8.0], 2) == [pytest.approx(1000), pytest.approx(2000)]
    assert median_steps(times, [20.0], 2) == []
