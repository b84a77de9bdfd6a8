"""`--enable-streaming-session`: a client sends only the new tokens of each turn."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import pytest

from bench.client import RequestRefused

from .conftest import BLOCK, STOCK, border, tokens


class Chat:
    def __init__(self, server):
        self.client = server.client
        self.id = self.client.post("/open_session", {"capacity_of_str_len": 1 << 16, "streaming": True}).json()

    def turn(self, new: list[int], n: int, *, ignore_eos: bool = True, sampling: dict | None = None, **session_options):
        session = {"id": self.id, **session_options}
        return self.client.generate(new, n, ignore_eos=ignore_eos, sampling=sampling, session_params=session)

    def close(self) -> None:
        assert self.client.post("/close_session", {"session_id": self.id}).status_code == 200


def test_turns_continue_conversation(small, rng):
    """Each turn is answered like the whole conversation, and recomputes none of its full blocks."""
    chat, history, turns = Chat(small), [], []
    for n, answer in ((2 * BLOCK + 9, BLOCK), (5, 1), (BLOCK, BLOCK + 3), (1, 20)):
        new = tokens(rng, n)
        got = chat.turn(new, answer)
        assert got.meta["prompt_tokens"] == len(history) + n
        written = len(history) - 1 if history else 0  # the last token of an answer is written with the next turn
        assert got.cached_tokens in ((written, written + 1) if STOCK else (border(written),))
        turns.append((history + new, got.ids))
        history = history + new + got.ids
    chat.close()
    if not STOCK:  # answers do not depend on the cache
        small.client.flush()
        for prompt, ids in turns:
            assert small.client.generate(prompt, len(ids)).ids == ids


def test_turn_that_stops_early(small, rng):
    answer: list[int] = []
    while len(set(answer)) < 2:  # two different tokens, the second of which ends the turn
        prompt = tokens(rng, BLOCK)
        answer = small.client.generate(prompt, 12).ids
    chat, stop = Chat(small), next(t for t in answer if t != answer[0])
    first = chat.turn(prompt, 12, ignore_eos=False, sampling={"stop_token_ids": [stop]})
    assert first.ids == answer[: answer.index(stop) + 1]
    assert chat.turn([5, 6], 4).meta["prompt_tokens"] == BLOCK + len(first.ids) + 2
    chat.close()


def test_refused_or_aborted_turn_leaves_session_usable(small, rng):
    chat, client = Chat(small), small.client
    first = chat.turn(tokens(rng, BLOCK + 3), 8)
    so_far = BLOCK + 3 + 8
    with pytest.raises(RequestRefused):
        chat.turn([7] * 5, 4, offset=1)
    aborted: list = []

    def long_turn() -> None:
        aborted.append(chat.turn(tokens(rng, BLOCK), 4000))

    thread = Thread(target=long_turn)
    thread.start()
    until = time.monotonic() + 60
    while not STOCK and client.stats()["tokens"] <= so_far + BLOCK:
        assert time.monotonic() < until, "the turn never ran"
        time.sleep(0.05)
    time.sleep(1)
    with pytest.raises(RequestRefused):  # a session has one turn at a time
        chat.turn([8] * 5, 4)
    client.post("/abort_request", {"abort_all": True})
    thread.join()
    assert aborted[0].meta["finish_reason"]["type"] == "abort"
    second = chat.turn(tokens(rng, 6), 8)
    assert second.meta["prompt_tokens"] == so_far + 6 and len(first.ids) == 8
    chat.close()
    with pytest.raises(RequestRefused):
        chat.turn([9], 2)


def test_concurrent_sessions(small, rng):
    chats = [Chat(small) for _ in range(6)]
    lengths = [0] * len(chats)
    for _ in range(3):
        new = [tokens(rng, rng.randint(1, 2 * BLOCK)) for _ in chats]
        with ThreadPoolExecutor(len(chats)) as pool:
            got = list(pool.map(lambda chat, prompt: chat.turn(prompt, 10), chats, new))
        for i, answer in enumerate(got):
            assert answer.meta["prompt_tokens"] == lengths[i] + len(new[i])
            lengths[i] += len(new[i]) + 10
    for chat in chats:
        chat.close()
