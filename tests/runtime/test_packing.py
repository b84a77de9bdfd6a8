"""The length N against which the blocks of a request are planned, under SGLang's overlap schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .model import P, make_runtime
from .overlap import Overlap, configured

LEANKV = {"policy": "leankv", "high": "k8v4", "low": "k4v2"}


def recorded(runtime) -> dict[int, int]:
    """Start of each block -> N of its first plan, of the plans that `runtime` queues from now on."""
    lengths, queue_move = {}, runtime.queue_move

    def record(due, **move):
        if move["from_format"] == 0:  # later plans of a block have their own tests
            lengths.update(zip(runtime.blocks.start[due].tolist(), move["lengths"].tolist()))
        return queue_move(due, **move)

    runtime.queue_move = record
    return lengths


def planned_lengths(answer: int, window: int) -> dict[int, int]:
    """`recorded` for a prompt of four blocks and an answer of `answer` tokens."""
    runtime = make_runtime(window=window, **LEANKV)
    lengths = recorded(runtime)
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


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("steps", "n"), [(0, 0), (1, 4 * P + 7), (2, 4 * P + 8), (9, 4 * P + 15)])
def test_blocks_of_retracted_request_are_planned_against_its_steps(steps, n, overlap):
    """Also if the result of the last step is not processed yet, as under overlap scheduling."""
    runtime = make_runtime(window=P, **LEANKV)
    lengths = recorded(runtime)
    with configured(runtime, None, retract_every=steps + 1):
        server = Overlap(runtime, None, disable=False)
        server.enable_overlap = overlap
        server.batch_result_processor = replace(server.batch_result_processor, enable_overlap=overlap)
        server.submit(list(range(4 * P + 5)), list(range(1000, 1040)), None, "tenant")
        server.submit([1, 2, 3], list(range(1000, 1040)), None, "tenant")  # SGLang never retracts all
        retracted = server.requests["0"]
        while not retracted.retraction_count:
            server.turn()
    assert server.forward_ct == 1 + steps + 1 and len(retracted.output_ids) == steps + (not overlap)
    assert lengths[3 * P] == n
