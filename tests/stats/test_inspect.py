"""`sglang-kvc inspect` with a server that only answers /server_info."""

from __future__ import annotations

import json
import socket
import threading
import xml.etree.ElementTree as ET
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from sglang_kvc import cli
from sglang_kvc.options.config import KvcConfig
from sglang_kvc.stats import head_map
from sglang_kvc.stats.records import HeadMap

from .test_stats import EMPTY, MAP, STATS

STATE = {"config": KvcConfig().to_dict(), "stats": STATS.to_dict(), "head_map": MAP.to_dict()}


@pytest.fixture
def serve():
    """`serve(answer, status=200)` -> the address of a server that gives this answer; a string is sent unchanged."""
    running = []

    def start(answer, status: int = 200, key: str | None = None) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                refused = key is not None and self.headers.get("Authorization") != f"Bearer {key}"
                body = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
                self.send_response(401 if refused else status if self.path == "/server_info" else 404)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        running.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def info(*states):
    return {"internal_states": [{"kvc": s} for s in states]}


def test_table(serve, capsys):
    url = serve(info(STATE))
    assert cli.main(["inspect", "--url", url + "/"]) == 0
    out = capsys.readouterr().out
    for words in ("leankv k8v4+k4v2", "sequence", "3.84x", "4.72x", "6000 of 23040", "31000 of 40000", "93.0 %"):
        assert words in out
    assert "16 k8v4+k4v2" in out and "7.53 ms each" in out and "pruned 10.0 %" in out


def test_empty_cache_is_shown(serve, capsys):
    assert cli.main(["inspect", "--url", serve(info({**STATE, "stats": EMPTY.to_dict()}))]) == 0
    assert "- over all resident tokens" in capsys.readouterr().out


def test_json(serve, capsys):
    assert cli.main(["inspect", "--json", "--url", serve(info(STATE))]) == 0
    assert json.loads(capsys.readouterr().out) == [STATE]


def test_api_key(serve, capsys):
    url = serve(info(STATE), key="secret")
    assert cli.main(["inspect", "--url", url, "--api-key", "secret"]) == 0
    assert cli.main(["inspect", "--url", url]) == 1
    assert "--api-key" in capsys.readouterr().err


@pytest.mark.parametrize("ending", ["html", "svg", "png"])
def test_map(serve, tmp_path, capsys, ending):
    if ending == "png":
        pytest.importorskip("matplotlib")
    file = tmp_path / f"map.{ending}"
    assert cli.main(["inspect", "--url", serve(info(STATE)), "--map", str(file)]) == 0
    assert str(file) in capsys.readouterr().out
    data = file.read_bytes()
    assert data.startswith({"html": b"<!doctype", "svg": b"<svg", "png": b"\x89PNG"}[ending])


def test_each_scheduler_gets_its_own_output(serve, tmp_path, capsys):
    file = tmp_path / "map.svg"
    assert cli.main(["inspect", "--url", serve(info(STATE, STATE)), "--map", str(file)]) == 0
    assert "scheduler 1" in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["map-1.svg", "map.svg"]


def test_svg_is_well_formed_and_shows_every_head():
    root = ET.fromstring(head_map.svg(MAP))
    titles = [t.text for t in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 8, "kept and high, for 2 layers of 2 heads"
    assert "layer 1, head 0: 25.0 % kept, 25.0 % high" in titles
    tall = HeadMap([[0.5] * 8] * 80, [[0.5] * 8] * 80, 1)  # one tier gives one panel
    assert len(list(ET.fromstring(head_map.svg(tall)).iter("{http://www.w3.org/2000/svg}title"))) == 640


def test_colors_range_from_pale_to_dark():
    assert head_map.color(0) == "#edf3fa" and head_map.color(1) == "#0b3d6e"
    assert head_map.color(-1) == head_map.color(0) and head_map.color(2) == head_map.color(1)


def test_html_escapes_external_text(tmp_path):
    assert "<script>" not in head_map.html(MAP, "<script>", "<script>", [("a", "<script>")])


HOSTILE = "\x1b]0;owned\x07<script>\u202e\x9b2J"


@pytest.mark.parametrize(
    "change",
    [
        {"head_map": {**MAP.to_dict(), "blocks": "<script>"}},
        {"head_map": {**MAP.to_dict(), "kept": [["<script>", 0.5], [0.25, 0.0]]}},
        {"head_map": {**MAP.to_dict(), "kept": [[1.0, 0.5], [0.25]]}},
        {"head_map": {**MAP.to_dict(), "high": [[0.5]]}},
        {"head_map": [1]},
        {"stats": {**STATS.to_dict(), "tokens": "many"}},
        {"stats": {**STATS.to_dict(), "blocks_by_format": {"bf16": "<script>"}}},
        {"stats": "none"},
    ],
    ids=["blocks", "kept", "ragged", "shapes", "no map", "count", "counts", "no figures"],
)
def test_non_numeric_statistics_are_rejected(serve, tmp_path, capsys, change):
    file = tmp_path / "map.html"
    url = serve(info({**STATE, **change}))
    assert cli.main(["inspect", "--url", url, "--map", str(file)]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and url in err
    assert not file.exists()


def test_server_text_is_escaped_in_terminal_and_page(serve, tmp_path, capsys):
    names = {"config": HOSTILE, "scope": HOSTILE, "blocks_by_format": {HOSTILE: 4}, "tokens_by_tier": {HOSTILE: 1}}
    file = tmp_path / "map.html"
    url = serve(info({**STATE, "stats": {**STATS.to_dict(), **names}}))
    assert cli.main(["inspect", "--url", url, "--map", str(file)]) == 0
    broken = serve(info({"config": {}, "error": HOSTILE}))
    assert cli.main(["inspect", "--url", broken]) == 1
    output = capsys.readouterr()
    for text in (output.out, output.err, file.read_text()):
        assert all(c == "\n" or c.isprintable() for c in text)
    assert "<script>" in output.out and "<script>" not in file.read_text()


@pytest.mark.parametrize("answer", [[], *({"internal_states": x} for x in (5, [5], [{"kvc": 5}]))], ids=str)
def test_answers_of_unexpected_shape_are_rejected(serve, capsys, answer):
    assert cli.main(["inspect", "--url", serve(answer)]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1


WRONG = [
    (info(), 200, "--kv-backend kvc"),
    ({"internal_states": [{}]}, 200, "--kv-backend kvc"),
    ("<html>", 200, "SGLang"),
    ({}, 500, "500"),
    (info({"config": {}, "error": "RuntimeError: no figures"}), 200, "no figures"),
]


@pytest.mark.parametrize("answer, status, words", WRONG, ids=["none", "stock", "other", "failing", "broken"])
def test_errors_are_one_line(serve, capsys, answer, status, words):
    assert cli.main(["inspect", "--url", serve(answer, status)]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and words in err


def test_unreachable_server_gives_one_line_error(capsys):
    assert cli.main(["inspect", "--url", "http://127.0.0.1:9"]) == 1
    assert cli.main(["inspect", "--url", "127.0.0.1:9"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 2 and "--url" in err


def test_map_needs_packed_blocks_and_known_suffix(serve, tmp_path, capsys):
    url = serve(info(STATE))
    assert cli.main(["inspect", "--url", url, "--map", str(tmp_path / "map.bmp")]) == 1
    empty = serve(info({**STATE, "head_map": HeadMap([[0.0]], [[0.0]], 0).to_dict()}))
    assert cli.main(["inspect", "--url", empty, "--map", str(tmp_path / "map.svg")]) == 1
    err = capsys.readouterr().err
    assert ".bmp" in err and "no block is packed yet" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["http://127.0.0.1:abc", "http://foo bar/", "http://[::1", "http://", "http://a\nb"])
def test_wrong_address_is_reported(capsys, url):
    assert cli.main(["inspect", "--url", url]) == 1
    error = capsys.readouterr().err
    assert "is not an address" in error and error.count("\n") == 1


def test_server_of_another_protocol_is_reported(capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        def answer():
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

        threading.Thread(target=answer, daemon=True).start()
        assert cli.main(["inspect", "--url", f"http://127.0.0.1:{listener.getsockname()[1]}"]) == 1
    assert "did not answer as an SGLang server" in capsys.readouterr().err


def test_key_that_no_header_may_have_is_reported(capsys):
    assert cli.main(["inspect", "--api-key", "a\nb"]) == 1
    assert "--api-key" in capsys.readouterr().err
