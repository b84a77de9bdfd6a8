"""Random requests to a starved server: each is answered in full, aborted or refused with a reason, and none leaves
anything in a tier.

Memory holds ten uncompressed blocks, host memory four packed ones. The disk holds fifteen, and refuses a quarter of all
blocks, as if it were full. Clients share prefixes, continue sessions, abort, hang up and flush, all at the same time.
"""

from __future__ import annotations

import itertools
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

REQUESTS = 2000 if common.has_gpu() else 240
CLIENTS, ROUNDS = 10, 3  # concurrent clients; rounds, each of which ends with empty tiers
TIMEOUT = 120  # seconds that no request may take
DEFAULT, NAMED = {}, {"kvc": "k4v4"}
ONE_SHOT = {"kvc": "one-shot:8x"}
LEVELS = (DEFAULT, DEFAULT, DEFAULT, NAMED, ONE_SHOT, LOSSLESS["custom_params"])
HINTS = ({}, {}, {"kvc_done": True}, {"kvc_ttl": 0}, {"kvc_ttl": 0.2}, {"kvc_steps": 0}, {"kvc_steps": 3})
WRONG = ({"kvc": "nonsense"}, {"kvc": "one-shot:0.5x"}, {"kvc_ttl": -1}, {"kvc_done": "soon"}, {"kvc_steps": 0.5})
PRIORITIES = (0, 0, 0, 5, 100)  # SGLang preempts for a priority that is at least ten higher
EXPECTED = {
    "answered", "aborted", "hung up", "wrong", "too long", "hits", "turns", "refused turns", "retracted",
    "flush refused", "evicted_blocks", "demoted_blocks", "host_saved_bytes", "host_loaded_bytes",
    "disk_written_bytes", "disk_read_bytes", "full disk",
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
        response = self.post(body)
        assert response.status_code == 200, f"{response.status_code}: {response.text}"
        answer = Answer.parse(response.json())
        assert answer.finish["type"] == "length", answer.finish
        assert len(answer.ids) == body["sampling_params"]["max_new_tokens"]
        self.seen["answered"] += 1
        self.seen["hits"] += answer.cached_tokens > 0
        self.seen["retracted"] += answer.meta["num_retractions"]
        return answer

    def refused(self, response: requests.Response, kind: str) -> None:
        assert response.status_code == 400, f"{response.status_code}: {response.text}"
        assert response.json()["error"]["message"]
        self.seen[kind] += 1

    def ask(self) -> None:
        self.answered(self.body())

    def ask_wrongly(self) -> None:
        self.refused(self.post(self.payload(self.prompt(self.longest // 2), self.draw.choice(WRONG))), "wrong")

    def ask_too_much(self) -> None:
        level, limit = self.draw.choice([(LOSSLESS["custom_params"], self.uncompressed), (DEFAULT, self.longest)])
        prompt = tokens(self.draw, limit + self.draw.choice([1, BLOCK, 10 * BLOCK]))
        self.refused(self.post(self.payload(prompt, level)), "too long")

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
            self.refused(self.post(body), "refused turns")
            self.session = None

    # ---- clients that do not wait for the answer

    def abort(self) -> None:
        """An abort after a moment. The request may have ended by then."""
        body = self.body()
        timer = threading.Timer(self.draw.random() / 2, self.client.post, ["/abort_request", {"rid": body["rid"]}])
        timer.start()
        response = self.post(body)
        timer.join()
        if response.status_code == 200:
            finish = response.json()["meta_info"]["finish_reason"]
            assert finish["type"] in ("length", "abort")
            self.seen["aborted" if finish["type"] == "abort" else "ended before the abort"] += 1
        else:  # aborted in the queue
            assert "abort" in response.json()["error"]["message"].lower(), response.text
            self.seen["aborted"] += 1

    def hang_up(self) -> None:
        """A connection that is closed in the queue, in the prompt or in the answer."""
        body, wait = self.body(stream=True), self.draw.choice([0.05, 0.2, TIMEOUT])
        try:
            with requests.post(self.server.url + "/generate", json=body, stream=True, timeout=(TIMEOUT, wait)) as got:
                assert got.status_code == 200, f"{got.status_code}: {got.text}"
                next(got.iter_lines())
        except (requests.Timeout, requests.ConnectionError):  # the latter between the head and the first event
            assert wait < TIMEOUT
        self.seen["hung up"] += 1

    def flush(self) -> None:
        response = self.client.post("/flush_cache")
        assert response.status_code in (200, 400) and response.text
        self.seen["flushed" if response.status_code == 200 else "flush refused"] += 1


def fill(disk: Path) -> None:
    """Let the disk refuse a quarter of all blocks: files take the names of their folders."""
    (folder,) = disk.iterdir()
    for i in range(64):
        (folder / f"{i:02x}").touch()


def check_empty(chatter: Chatter, disk: Path) -> dict:
    """Check that a prompt can still use all memory and that a flush empties every tier but the disk; the statistics."""
    client = chatter.client
    longest = client.server_info()["max_req_input_len"] - 1
    chatter.answered(client.payload(tokens(random.Random(1), longest), 1))
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
    clients, seen = [Chatter(server, seed, trunks) for seed in range(CLIENTS)], Counter()
    stats = server.client.stats()

    def run(client: Chatter) -> None:
        for _ in range(REQUESTS // ROUNDS // CLIENTS):
            client.act()

    for _ in range(ROUNDS):
        before = stats
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(run, clients))
        stats = check_empty(clients[0], disk)
        assert stats["host_saved_bytes"] > before["host_saved_bytes"], "host memory is never free"
    for client in clients:
        seen += client.seen
    seen += Counter({name: stats[name] for name in EXPECTED & stats.keys()})
    seen["full disk"] = server.log.read_text().count("cannot be written")
    print(dict(seen))
    assert not {event for event in EXPECTED if seen[event] <= 0}, "the server did too little"
    server.client.post("/hicache/storage-backend/clear").raise_for_status()
    stats = server.client.stats()
    assert not stats["disk_blocks"] and not stats["disk_bytes"]
