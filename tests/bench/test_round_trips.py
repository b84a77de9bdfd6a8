"""The round-trip benchmark: when answers count as equal, and what its scores compare."""

import json
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from bench import common
from bench.client import Answer, Client, RequestRefused
from bench.quality import round_trips
from bench.quality.asking import CellError
from bench.quality.tasks import Context, Question

WORK = SimpleNamespace(contexts={"niah": [Context("c", (1,), tuple(Question((2,), str(i)) for i in range(4)))]})


def phase(*texts: str, hits: int = 64) -> dict:
    return {"niah": [SimpleNamespace(text=t, ids=list(t.encode()), cached_tokens=hits) for t in texts]}


def rows(**phases: dict) -> dict:
    return {n: round_trips.compare(p, phases.get(round_trips.BEFORE.get(n)), WORK) for n, p in phases.items()}


TIMES = {"before_demotion": 0.5, "demoted": 0.6}


def test_scores_count_equal_answers_and_lost_points(monkeypatch):
    warm, worse = phase("0", "1", "2", "x"), phase("0", "1", "x", "x")
    got = rows(
        cold=warm, warm=warm, host=warm, disk=phase("0", "1", "2", "y"), before_demotion=warm, demoted=worse,
        demoted_host=worse, floor=phase("0", "x", "x", "x"),
    )  # fmt: skip
    assert got["demoted"]["niah"] | {"marks": None} == {"right": 2, "of": 4, "marks": None, "equal": 3, "same_hits": 4,
                                                      "fewer_hits": []}  # fmt: skip
    monkeypatch.setattr(common, "has_gpu", lambda: True)
    scores = round_trips.scores(got, TIMES)
    assert scores["agents.round_trips_equal"].value == pytest.approx(11 / 12)
    assert scores["agents.demoted_points"].value == pytest.approx(25)
    ratio = scores["agents.demoted_ttft_ratio"]
    assert ratio.value == pytest.approx(1.2) and ratio.n == 4
    assert ratio[1:3] == ("of the time before", "the same prompts before demotion")
    monkeypatch.setattr(common, "has_gpu", lambda: False)
    assert round_trips.scores(got, TIMES).keys() == scores.keys() - {"agents.demoted_ttft_ratio"}


def test_fastest_of_repeated_prompts_counts():
    """The answer and the hits are those of the first one."""
    seconds, sent = iter((0.5, 0.2, 0.9, 0.4, 0.3, 0.7)), []

    def generate_streamed(prompt_ids, tokens, **options):
        sent.append(prompt_ids)
        return Answer(str(len(sent)), [], 3, len(sent), {}, first_token_s=next(seconds))

    question = Question((2,), "x")
    workload = SimpleNamespace(contexts={"niah": [Context("c", (1,), (question, replace(question, ask=(3,))))]})
    server, args = SimpleNamespace(client=SimpleNamespace(generate_streamed=generate_streamed)), SimpleNamespace()
    got = round_trips.ask(server, workload, args, tokens=1, repeats=3)["niah"]
    assert [(a.text, a.cached_tokens, a.first_token_s) for a in got] == [("1", 1, 0.2), ("4", 4, 0.3)]
    assert sent == 3 * [[1, 2]] + 3 * [[1, 3]]


def test_first_token_is_median_of_all_tasks():
    times = {"niah": (0.1, 0.2, 0.9), "kv": (0.3, 0.4)}
    phase = {task: [SimpleNamespace(first_token_s=t) for t in seconds] for task, seconds in times.items()}
    assert round_trips.first_token_s(phase) == 0.3


def test_prompt_with_fewer_hits_is_counted():
    got = rows(warm=phase("0", "1", "2", "3"), host=phase("0", "1", "2", "3", hits=0))
    assert got["host"]["niah"]["equal"] == 4 and got["host"]["niah"]["same_hits"] == 0
    assert [question for question, now, earlier in got["host"]["niah"]["fewer_hits"] if now < earlier] == [0, 1, 2, 3]


def test_eviction_and_demotion_end_when_all_blocks_have_moved():
    begun = {"evicted_blocks": 5, "demoted_blocks": 2, "packed_tokens": 640, "block": 64, "blocks_by_format": {"a": 10}}
    assert not round_trips.evicted(begun, begun | {"evicted_blocks": 14})
    assert round_trips.evicted(begun, begun | {"evicted_blocks": 15})
    assert not round_trips.demoted(begun, begun | {"demoted_blocks": 11})
    assert round_trips.demoted(begun, begun | {"demoted_blocks": 12})
    with pytest.raises(CellError, match="evicted before"):
        round_trips.demoted(begun, begun | {"demoted_blocks": 12, "evicted_blocks": 6})


class Streaming(BaseHTTPRequestHandler):
    """A server that streams three tokens, one every 50 ms. Each event contains the answer so far. Prompt [0] gets an
    error event, and prompt [1] an HTTP error."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert body["stream"] and body["sampling_params"]["max_new_tokens"] == 3 and body["extra_key"] == "k"
        prompt = body["input_ids"]
        self.send_response(400 if prompt == [1] else 200)
        self.end_headers()
        if prompt == [1]:
            self.wfile.write(b"too long")
            return
        events = [{"error": {"message": "no memory", "code": 503}}]
        if prompt != [0]:
            meta = {"prompt_tokens": 2, "cached_tokens": 1, "finish_reason": {"type": "length"}}
            events = [{"text": "abc"[:n], "output_ids": [7, 8, 9][:n], "meta_info": meta} for n in (1, 2, 3)]
        for event in events:
            time.sleep(0.05)
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *args):
        pass


def test_streamed_answer_has_time_to_first_token():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Streaming)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client = Client(f"http://127.0.0.1:{server.server_port}")
    began = time.monotonic()
    answer = client.generate_streamed([5, 6], 3, extra_key="k")
    assert 0.04 < answer.first_token_s < time.monotonic() - began - 0.08
    assert (answer.text, answer.ids, answer.cached_tokens) == ("abc", [7, 8, 9], 1)
    for prompt, status in (([0], 503), ([1], 400)):
        with pytest.raises(RequestRefused) as e:
            client.generate_streamed(prompt, 3, extra_key="k")
        assert e.value.status == status
    server.shutdown()
