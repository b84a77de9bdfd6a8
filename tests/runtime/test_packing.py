"""The length N against which the blocks of a request are planned, under SGLang's overlap schedule."""

from __future__ import annotations

import pytest

from .model import P, make_runtime
from .overlap import Overlap, configured

LEANKV = {"policy": "leankv", "high": "k8v4", "low": "k4v2"}


def planned_lengths(answer: int, window: int) -> dict[int, int]:
    """Start of each block -> N of its plan, for a prompt of four blocks and an answer of `answer` tokens."""
    runtime, lengths = make_runtime(window=window, **LEANKV), {}
    queue_move = runtime.queue_move

    def recorded(due, **move):
        if move["from_format"] == 0:  # later plans of a block have their own tests
            lengths.update(zip(runtime.blocks.start[due].tolist(), move["lengths"].tolist()))
        return queue_move(due, **move)

    runtime.queue_move = recorded
    with configured(runtime, None, retract_every=10**6):
        server = Overlap(runtime, None, disable=False)
        server.submit(list(range(4 * P + 5)), list(range(1000, 1000 + answer)), None, "tenant")
        while server.busy:
            server.turn()
        server.turn()  # the last step, which overlap scheduling ran ahead
    return lengths


@pytest.mark.parametrize("answer", [1, 2, 40])
def test_blocks_of_prompt_are_planned_against_their_positions(answer):
    """Also if the request ends with its prefill, and overlap scheduling has run a step ahead."""
    assert planned_lengths(answer, window=0) == dict.fromkeys(range(0, 4 * P, P), 0)


@pytest.mark.parametrize(("answer", "n"), [(1, 0), (2, 4 * P + 7), (40, 4 * P + 45)])
def test_blocks_of_window_are_planned_at_end(answer, n):
    """Against the length of the sequence if a step has decoded a token, else as a prompt."""
    lengths = planned_lengths(answer, window=P)
    assert set(lengths) == set(range(0, 4 * P, P))
    assert [lengths[i * P] for i in range(3)] == [0, 0, 0] and lengths[3 * P] == n
