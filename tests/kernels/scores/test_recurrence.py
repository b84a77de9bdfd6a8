"""Recurrence words against lists of important queries."""

import numpy as np
import pytest
import torch

from kvc_kernels import ops
from kvc_kernels.scores.recurrence import LATEST, LONGEST, recurred


def advance(words, last, timed=True):
    return recurred(words, torch.as_tensor(last).float(), timed)


def test_words_hold_last_query_and_longest_interval():
    draw = np.random.default_rng(torch.initial_seed() % 2**32)
    words, times = torch.zeros(50), [[] for _ in range(50)]
    for step in range(1, 200):
        important = draw.random(50) < np.linspace(0, 0.3, 50)
        words = advance(words, step * important)
        for i in np.flatnonzero(important):
            times[i].append(step)
    last, interval = ops.recurrence(words)
    assert last.tolist() == [x[-1] if x else 0 for x in times]
    assert interval.tolist() == [max(np.diff(x), default=0) for x in times]
    assert last[0] == 0 and interval.max() > 10


def test_prefill_adds_no_interval():
    """Chunks give the word of one prefill, and the next decode step counts from its last query."""
    words = torch.zeros(1)
    for step in (20, 70, 0):
        words = advance(words, [step], timed=False)
    assert torch.equal(words, advance(torch.zeros(1), [70], timed=False))
    assert [x.item() for x in ops.recurrence(advance(words, [75]))] == [75, 5]


def test_older_query_of_a_shared_block_changes_nothing():
    words = advance(advance(torch.zeros(1), [50]), [90])
    assert torch.equal(advance(words, [60]), words)


@pytest.mark.parametrize("last", [1, LONGEST, LATEST, LATEST + 1, 1 << 23])
def test_words_are_normal_numbers(last):
    """Copies as fp32 keep them, also where time and interval are at their limits."""
    words = advance(advance(torch.zeros(1), [1]), [last])
    assert words.isfinite().all() and words.abs() >= torch.finfo(torch.float32).tiny
    assert torch.equal((words + 0.0).view(torch.int32), words.view(torch.int32))
    assert [x.item() for x in ops.recurrence(words)] == [min(last, LATEST), min(last - 1, LONGEST)]


@pytest.mark.parametrize("wrong", [{"reduce": "recurrence"}, {"alpha": 0.1}, {"reduce": "recurrence", "alpha": 1.5}])
def test_threshold_belongs_to_recurrence(wrong):
    with pytest.raises(ValueError, match="attention is collected with a threshold alpha"):
        ops.ScoreSampling(**wrong)
