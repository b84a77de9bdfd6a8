"""Random requests to a starved server: each is answered in full, aborted or refused with a reason, and none leaves
anything in a tier.

Memory holds ten uncompressed blocks, host memory four packed ones. The disk holds fifteen, and refuses a quarter of all
blocks, as if it were full. Clients share prefixes, continue sessions, abort, hang up and flush, all at the same time.
"""

from __future__ import annotations

import itertools
import json
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

from bench import common
from bench.client import Answer

from .conftest import BLOCK, LOSSLESS, STOCK, tokens

pytestmark = pytest.mark.skipif(STOCK, reason="about the tiers of the compressed cache")

REQUESTS = 2000 if common.has_gpu() else 160
# Concurrent clients; rounds, each of which ends with empty tiers; most rounds until all expected events have occurred,
# since some depend on timing.
CLIENTS, ROUNDS, MOST_ROUNDS = 10, 2, 12
TIMEOUT = 120  # seconds that no request may take
DEFAULT, NAMED = {}, {"kvc": "k4v4"}
ONE_SHOT = {"kvc": "one-shot:8x"}
LEVELS = (DEFAULT, DEFAULT, DEFAULT, NAMED, ONE_SHOT, LOSSLESS["custom_params"])
HINTS = ({}, {}, {"kvc_done": True}, {"kvc_ttl": 0}, {"kvc_ttl": 0.2}, {"kvc_steps": 0}, {"kvc_steps": 3})
WRONG = (
    ({"kvc": "nonsense"}, "not a level"), ({"kvc": "one-shot:0.5x"}, "out of range"), ({"kvc_ttl": -1}, "kvc_ttl"),
    ({"kvc_done": "soon"}, "kvc_done"), ({"kvc_steps": 0.5}, "kvc_steps"),
)  # fmt: skip
PRIORITIES = (0, 0, 0, 5, 100)  # SGLang preempts for a priority that is at least ten higher
# SGLang's reasons of an abort that a client asked for; every other abort is a refusal.
ABORTED = {"Abort in waiting queue": "aborted in the queue", "Aborted": "aborted while it ran"}
EXPECTED = {  # events and their minimum numbers
    "answered": 60, "hits": 20, "turns": 10, "refused turns": 3, "wrong": 5, "too long": 5, "retracted": 2,
    "aborted in the queue": 3, "aborted while it ran": 2, "hung up before the answer": 3, "hung up in the answer": 1,
    "flush refused": 3, "evicted_blocks": 50, "demoted_blocks": 50, "host_saved_bytes": 1, "host_loaded_bytes": 1,
    "disk_written_bytes": 1, "disk_read_bytes": 1, "full disk": 5,
}  # fmt: skip


class Chatter:
    """A client that sends one request after the other, drawn from one seed, and counts in `seen` what happens."""

    def __init__(self, server: common.Server, seed: int, trunks: list[list[int]]):
        self.server, self.client, self.draw, self.trunks = server, server.client, random.Random(seed), trunks
        self.name, self.numbers, self.seen = f"{seed:02}", itertools.count(), Counter()
        info = self.client.server_info()
        self.longest = info["internal_states"][0]["kvc"]["longest_prompt"]["default"]
        self.uncompressed = info["max_total_num_tokens"]
        self.session, self.history = None, 0

    def act(self) -> None:
        actions = {
            self.ask: 10, self.turn: 5, self.abort: 3, self.hang_up: 3, self.ask_wrongly: 1, self.ask_too_much: 1,
            self.flush: 1,
        }  # fmt: skip
        self.draw.choices(list(actions), list(actions.values()))[0]()

    # ---- requests

    def prompt(self, most: int) -> list[int]:
        draw, trunk = self.draw, self.draw.choice(self.trunks)
        prompt = trunk[: draw.randint(0, len(trunk) // BLOCK) * BLOCK]
        return [*prompt, *tokens(draw, draw.choice([1, 5, BLOCK - 1, BLOCK, 3 * BLOCK]))][-most:]

    def body(self, **extra) -> dict:
        level, most = self.draw.choice(LEVELS), self.longest // 2
        prompt = self.prompt(most if level in (DEFAULT, NAMED) else 3 * BLOCK)
        if level == ONE_SHOT:
            prompt += tokens(self.draw, 3 * BLOCK)  # long enough to drop whole blocks
        return self.payload(prompt, level, **extra)

    def payload(self, prompt: list[int], level: dict, **extra) -> dict:
        draw, custom = self.draw, {**self.draw.choice(HINTS), **level}
        answer = draw.choice([1, 2, 8, 8, 24, BLOCK + 1])
        return self.client.payload(
            prompt, answer, sampling={"custom_params": custom}, priority=draw.choice(PRIORITIES),
            rid=f"{self.name}-{next(self.numbers)}-", **extra,
        )  # fmt: skip

    def post(self, body: dict) -> requests.Response:
        return requests.post(self.server.url + "/generate", json=body, timeout=TIMEOUT)

    def answered(self, body: dict) -> Answer:
        """The answer, which must be complete."""
        answer = self.ended(body)
        assert answer.finish["type"] == "length", answer.finish
        self.seen["answered"] += 1
        self.seen["hits"] += answer.cached_tokens > 0
        self.seen["retracted"] += answer.meta["num_retractions"]
        return answer

    def ended(self, body: dict) -> Answer:
        """The answer, which is complete unless the request was aborted."""
        response = self.post(body)
        assert response.status_code == 200, f"{response.status_code}: {response.text}"
        answer = Answer.parse(response.json())
        if answer.finish["type"] == "length":
            assert len(answer.ids) == body["sampling_params"]["max_new_tokens"]
        return answer

    def refused(self, response: requests.Response, kind: str, reason: str) -> None:
        assert response.status_code == 400, f"{response.status_code}: {response.text}"
        assert reason in response.json()["error"]["message"], response.text
        self.seen[kind] += 1

    def ask(self) -> None:
        self.answered(self.body())

    def ask_wrongly(self) -> None:
        custom, reason = self.draw.choice(WRONG)
        self.refused(self.post(self.payload(self.prompt(self.longest // 2), custom)), "wrong", reason)

    def ask_too_much(self) -> None:
        level, limit, reason = self.draw.choice([
            (LOSSLESS["custom_params"], self.uncompressed, "KV cache at lossless"),
            (DEFAULT, self.longest, f"up to {self.longest} tokens"),
        ])  # fmt: skip
        prompt = tokens(self.draw, limit + self.draw.choice([1, BLOCK, 10 * BLOCK]))
        self.refused(self.post(self.payload(prompt, level)), "too long", reason)

    # ---- sessions

    def turn(self) -> None:
        """The next turn of the client's session. A session ends when it gets long."""
        if self.session is None:
            self.session = self.client.post("/open_session", {"capacity_of_str_len": 1 << 16, "streaming": True}).json()
            self.history = 0
        body = self.payload(self.prompt(3 * BLOCK), DEFAULT, session_params={"id": self.session})
        self.history += len(body["input_ids"])
        answer = self.answered(body)
        assert answer.prompt_tokens == self.history
        self.history += len(answer.ids)
        self.seen["turns"] += 1
        if self.history > self.longest // 2 or self.draw.random() < 0.3:
            self.client.post("/close_session", {"session_id": self.session}).raise_for_status()
            self.refused(self.post(body), "refused turns", f"{self.session} does not exist")
            self.session = None

    # ---- clients that do not wait for the answer

    def abort(self) -> None:
        """An abort after a moment. The request may have ended by then."""
        body = self.body()
        seconds = self.draw.random() * self.draw.choice([0.05, 0.5])
        timer = threading.Timer(seconds, self.client.post, ["/abort_request", {"rid": body["rid"]}])
        timer.start()
        finish = self.ended(body).finish
        timer.join()
        self.seen["ended before the abort" if finish["type"] == "length" else ABORTED[finish["message"]]] += 1

    def hang_up(self) -> None:
        """A connection that is closed in the queue, in the prompt or in the answer."""
        body, wait = self.body(stream=True), self.draw.choice([0.05, 0.2, TIMEOUT])
        try:
            with requests.post(self.server.url + "/generate", json=body, stream=True, timeout=(TIMEOUT, wait)) as got:
                assert got.status_code == 200, f"{got.status_code}: {got.text}"
                event = first_event(got)
        except (requests.Timeout, requests.ConnectionError):  # the latter between the head and the first event
            assert wait < TIMEOUT
            self.seen["hung up before the answer"] += 1
        else:
            finish = event["meta_info"]["finish_reason"]
            assert event["output_ids"] and (finish is None or finish["type"] == "length"), event
            self.seen["hung up in the answer"] += 1

    def flush(self) -> None:
        response = self.client.post("/flush_cache")
        assert response.status_code == 200 or (response.status_code, response.text) == (400, "Flush cache failed.\n")
        self.seen["flushed" if response.status_code == 200 else "flush refused"] += 1


def first_event(response: requests.Response) -> dict:
    """The first event with tokens. SGLang sends events without tokens for a request that it retracts before it has the
    result of a forward in flight."""
    events = (json.loads(line.removeprefix(b"data: ")) for line in response.iter_lines() if line)
    return next(event for event in events if event["output_ids"] or event["meta_info"]["finish_reason"])


def fill(disk: Path) -> None:
    """Let the disk refuse a quarter of all blocks: files take the names of their folders."""
    (folder,) = disk.iterdir()
    for i in range(64):
        (folder / f"{i:02x}").touch()


def check_empty(chatter: Chatter, disk: Path) -> dict:
    """Check that a prompt can still use all memory and that a flush empties every tier but the disk; the statistics."""
    client = chatter.client
    chatter.answered(client.payload(tokens(random.Random(1), chatter.longest), 1))
    client.flush()
    stats = client.when_idle()
    assert stats["pages_free"] == stats["pages_total"] and not stats["tokens"] and not stats["bytes"]
    assert not stats["host_bytes"] and not stats["host_blocks"]
    files = [path for path in disk.glob("*/*/*") if path.is_file()]
    assert stats["disk_bytes"] == sum(path.stat().st_size for path in files) <= stats["disk_bytes_total"]
    assert stats["disk_blocks"] == len(files) and not stats["disk_damaged"]
    return stats


def test_starved_server_answers_or_refuses_every_request(starved):
    server, disk, draw = starved, Path(starved.args[starved.args.index("--kvc-disk") + 1]), random.Random(0)
    fill(disk)
    trunks = [tokens(draw, 4 * BLOCK) for _ in range(3)]
    clients = [Chatter(server, seed, trunks) for seed in range(CLIENTS)]
    stats = server.client.stats()

    def run(client: Chatter) -> None:
        for _ in range(REQUESTS // ROUNDS // CLIENTS):
            client.act()

    for number in range(1, MOST_ROUNDS + 1):
        before = stats
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(run, clients))
        stats = check_empty(clients[0], disk)
        assert stats["host_saved_bytes"] > before["host_saved_bytes"], "host memory is never free"
        seen = sum((client.seen for client in clients), Counter())
        seen += Counter({name: stats[name] for name in EXPECTED.keys() & stats.keys()})
        seen["full disk"] = server.log.read_text().count("cannot be written")
        rare = {event: seen[event] for event, least in EXPECTED.items() if seen[event] < least}
        if number >= ROUNDS and not rare:
            break
    print(number, dict(seen))
    assert not rare, "the server did too little"
    server.client.post("/hicache/storage-backend/clear").raise_for_status()
    stats = server.client.stats()
    assert not stats["disk_blocks"] and not stats["disk_bytes"]
