"""Serves the demo model with the compressed cache, and prints how to use it. `make serve` runs it.

    python -m sglang_kvc.demo.server [--port 30000] [any option of sglang.launch_server]
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

from sglang_kvc.demo.model import DemoError, ensure

START_LIMIT_S = 1800  # the first start on a GPU may compile kernels for minutes
STOP_LIMIT_S = 20
QUESTION = '{"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}'
QUIET = ["--uvicorn-access-log-exclude-prefixes", "/health"]  # this process asks every second until the server is up


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=_port, default=30000)
    args, server_options = parser.parse_known_args(argv)
    url = f"http://127.0.0.1:{args.port}"
    if _taken(args.port):
        return _fail(f"port {args.port} is in use; choose another: make serve PORT={args.port + 1}")
    try:
        model = ensure()
    except DemoError as e:
        return _fail(str(e))

    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--kv-backend", "kvc"]
    command += ["--port", str(args.port), *QUIET, *server_options]
    print("$ " + shlex.join(command), flush=True)
    for ending in (signal.SIGINT, signal.SIGTERM):  # both: shells start background jobs with SIGINT ignored
        signal.signal(ending, signal.default_int_handler)
    # In its own session, Ctrl-C reaches this process only, which then ends the server and its children in order.
    server = subprocess.Popen(command, start_new_session=True)
    try:
        if not _wait_until_healthy(server, url):
            return _fail("the server did not start; its last lines above say why")
        _greet(url)
        return server.wait()
    except KeyboardInterrupt:
        print("\nstopping ...", flush=True)
        return 0
    finally:
        _stop(server)


def _greet(url: str) -> None:
    command = os.path.relpath(os.path.join(os.path.dirname(sys.executable), "sglang-kvc"))
    print(
        f"\nReady. Ask it something:\n\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{QUESTION}'\n\n"
        f"Show its cache statistics:\n\n"
        f"  {command} inspect --url {url}\n\n"
        f"Ctrl-C stops it.\n",
        flush=True,
    )


def _wait_until_healthy(server: subprocess.Popen, url: str) -> bool:
    end = time.monotonic() + START_LIMIT_S
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            with urllib.request.urlopen(url + "/health", timeout=10):
                return True
        time.sleep(1)
    return False


def _stop(server: subprocess.Popen) -> None:
    """Interrupt the server, then kill everything that it started."""
    if server.poll() is None:
        server.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(STOP_LIMIT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def _port(text: str) -> int:
    if not 0 < (port := int(text)) < 1 << 16:
        raise argparse.ArgumentTypeError(f"{port} is not a port; give one from 1 to 65535")
    return port


def _taken(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


def _fail(sentence: str) -> int:
    print(f"error: {sentence}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
