"""Servers of the benchmarks listen at their own ports and choose others if those are taken."""

import socket
import sys

import pytest

from bench import common, ports

# As in SGLang, an HTTP server that cannot listen logs this and ends, while the process lives on.
STANDS_IN = """
import sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

try:
    HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
except OSError as e:
    print("ERROR:", e, flush=True)
    time.sleep(600)
"""


class StandsIn(common.Server):
    def _listen_at(self, port):
        super()._listen_at(port)
        self.tried_ports = [*getattr(self, "tried_ports", []), self.port]
        self.command = [sys.executable, "-c", STANDS_IN, str(self.port)]


@pytest.fixture
def taken():
    with socket.socket() as s:
        s.bind(("127.0.0.1", ports.free_ports(1)[0]))
        s.listen()
        yield s.getsockname()[1]


def test_bound_port_is_not_free(taken, monkeypatch):
    assert not ports.are_free(taken)
    monkeypatch.setattr(ports, "RANGE", range(taken, taken + 1))
    with pytest.raises(OSError, match="Fewer than 1 of the ports"):
        ports.free_ports(1)


def test_ports_differ_and_lie_outside_ephemeral_range():
    chosen = ports.free_ports(50)
    assert len(set(chosen)) == 50 and all(p in ports.RANGE for p in chosen)
    assert ports.RANGE.stop <= 32768


@pytest.mark.slow
def test_server_with_taken_port_starts_at_another(taken, monkeypatch):
    free_ports = ports.free_ports
    answers = iter([[taken, taken]])
    monkeypatch.setattr(ports, "free_ports", lambda count: next(answers, None) or free_ports(count))
    with StandsIn([], model="none") as server:
        assert server.tried_ports[0] == taken != server.tried_ports[1]
        assert server.url == server.client.url == f"http://127.0.0.1:{server.port}" and len(server.tried_ports) == 2


@pytest.mark.slow
def test_requested_port_is_not_replaced(taken):
    server = StandsIn([], model="none", port=taken)
    with pytest.raises(common.PortTakenError, match="took a port"):
        server.start()
    assert server.process is None


def test_given_nccl_port_is_used():
    chosen = common.Server(["--nccl-port=1234"], model="none")
    assert chosen.command.count("--nccl-port") == 0
    assert common.Server([], model="none").command.count("--nccl-port") == 1
