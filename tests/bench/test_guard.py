"""An interrupted test run leaves no server behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Stands in for a server and its scheduler process. It ends neither by itself nor by a terminal's interrupt.
SERVER = """
import json, os, signal, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

for sig in (signal.SIGINT, signal.SIGTERM):
    signal.signal(sig, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open("pids.part", "w") as f:
    json.dump([os.getpid(), child.pid, os.getppid()], f)
os.rename("pids.part", sys.argv[2])
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
TEST = f"""
import sys, time
import pytest
from bench import common

class Server(common.Server):
    def _listen_at(self, port):
        super()._listen_at(port)
        self.command = [sys.executable, "-c", {SERVER!r}, str(self.port), {{pids!r}}]

@pytest.fixture(scope="session")
def server():
    with Server([], model="x") as server:
        yield server

def test_waits(server):
    time.sleep(600)
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.1)
    return condition()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "how"), [(0, "interrupted"), (1, "interrupted"), (0, "killed"), (1, "worker killed")]
)
def test_no_server_outlives_test_run(tmp_path, workers, how):
    pids, test = tmp_path / "pids", tmp_path / "test_it.py"
    test.write_text(TEST.format(pids=str(pids)))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "-n", str(workers)]
    path = os.pathsep.join(str(ROOT / folder) for folder in ("", "kernels", "patches"))
    run = subprocess.Popen(
        [*command, str(test)], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background ignores it
    )  # fmt: skip
    started: list[int] = []
    try:
        if not wait_until(pids.exists, 120):
            run.kill()
            pytest.fail(run.communicate()[0])
        *started, starter = json.loads(pids.read_text())
        if how == "interrupted":
            os.killpg(run.pid, signal.SIGINT)  # as a terminal does on Ctrl-C
        else:
            os.kill(run.pid if how == "killed" else starter, signal.SIGKILL)
        assert wait_until(lambda: not any(is_alive(pid) for pid in started), 60), "a server lives on"
    finally:
        for group in (run.pid, *started[:1]):
            try:
                os.killpg(group, signal.SIGKILL)
            except ProcessLookupError:
                pass
        run.communicate()
