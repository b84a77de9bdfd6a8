"""Servers whose processes start with SGLang imported.

A server has three or more processes. Each of them imports SGLang, which takes most of the time that a test server needs
to start. Here one process, the template, imports it and then only forks:

* A server is a fork of the template, which runs `sglang.launch_server`.
* A process that the server spawns is a fork of a helper, which the server forked before it ran anything. So it sees the
  modules of the template and nothing of the server's state, as after a spawn. It is a child of the server, because it
  is orphaned at once and the server adopts orphans.

Run as a module, this file is the template. It reads requests from stdin, a line of JSON each, and answers on stdout.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib
import json
import os
import re
import runpy
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

MODULES = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.data_parallel_controller",
    "sglang.srt.models.registry",
    "sglang_kvc.adapter.build_pool",
    "sglang_kvc.adapter.radix_cache",
)
PR_SET_CHILD_SUBREAPER = 36
SPAWN = re.compile(r"spawn_main\(tracker_fd=(\d+), pipe_handle=(\d+)\)")
MESSAGE = 1 << 20  # bytes; more than a command line and an environment


class Preloaded:
    """The template. `popen` starts a server, like `subprocess.Popen`."""

    def __init__(self, env: dict[str, str]):
        self._lock = threading.Lock()
        self._template = subprocess.Popen(
            [sys.executable, "-m", __name__, "--kv-backend", "kvc"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True,
            start_new_session=True,  # Ctrl-C interrupts pytest, which still needs it to stop the servers
        )  # fmt: skip

    def popen(self, command: list[str], *, stdout, env: dict[str, str], cwd: Path, **_) -> Forked:
        assert command[1:3] == ["-m", "sglang.launch_server"]
        return Forked(self, self.ask(argv=command[3:], log=stdout.name, env=env, cwd=str(cwd)))

    def ask(self, **request):
        with self._lock:
            print(json.dumps(request), file=self._template.stdin, flush=True)
            if not (answer := self._template.stdout.readline()):
                raise RuntimeError(f"the process that forks test servers ended with code {self._template.wait()}")
            return json.loads(answer)

    def close(self) -> None:
        self._template.stdin.close()
        try:
            self._template.wait(10)
        except subprocess.TimeoutExpired:  # a fork of this process still holds the pipe
            self._template.kill()
            self._template.wait()
        self._template.stdout.close()


class Forked:
    """A server, with the part of `subprocess.Popen` that `bench.common.Server` uses."""

    def __init__(self, template: Preloaded, pid: int):
        self.pid, self.returncode = pid, None
        self._template = template

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                self.returncode = self._template.ask(poll=self.pid)
            except (OSError, RuntimeError):  # the template has ended, and this server is an orphan
                self.returncode = None if Path(f"/proc/{self.pid}").exists() else -1
        return self.returncode

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("sglang.launch_server", timeout)
            time.sleep(0.05)
        return self.returncode


# ---- in the template and its forks


def template() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # what an import prints is no answer
    for name in MODULES:
        importlib.import_module(name)
    from sglang.srt.models.registry import ModelRegistry

    ModelRegistry.get_supported_archs()
    _index_imports()
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"an import started threads, which a fork would lose: {threads}"
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            answer = _exit_code(request["poll"])
        elif (answer := os.fork()) == 0:
            os.close(answers)
            _leave(server, **request)
        os.write(answers, json.dumps(answer).encode() + b"\n")


def _exit_code(pid: int) -> int | None:
    try:
        pid, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:  # two threads asked
        return -1
    return os.waitstatus_to_exitcode(status) if pid else None


def _index_imports() -> None:
    """Let SGLang find the importers of a hooked function in an index.

    For each hook it searches all modules, which takes seconds in every process.
    """
    from sglang.srt.plugins import hook_registry

    def attributes(modules):
        return [(m, name, x) for m in modules if isinstance(m, ModuleType) for name, x in list(vars(m).items())]

    known, importers = set(sys.modules), {}
    for module, name, value in attributes(list(sys.modules.values())):
        if callable(value):
            importers.setdefault(id(value), []).append((module, name))

    def propagate(original, wrapped, source) -> int:
        new = attributes(module for name, module in list(sys.modules.items()) if name not in known)
        places = importers.get(id(original), []) + [(module, name) for module, name, x in new if x is original]
        for module, name in places:
            if module is not source:
                setattr(module, name, wrapped)
        return len(places)

    hook_registry._propagate_patch = propagate


def server(argv: list[str], log: str, env: dict[str, str], cwd: str) -> None:
    os.setsid()
    out, null = os.open(log, os.O_WRONLY | os.O_APPEND), os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (out, 1), (out, 2)):
        os.dup2(source, target)
    os.closerange(3, 100)
    os.chdir(cwd)
    _environment(env)
    _spawn_by_forks()
    sys.argv = ["", *argv]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def _environment(env: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    added = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    sys.path[:0] = added


def _spawn_by_forks() -> None:
    """Fork the helper, and let multiprocessing start its processes there."""
    from multiprocessing import util

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        _leave(_helper, theirs)
    theirs.close()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    spawn, lock = util.spawnv_passfds, threading.Lock()

    def fork(path, args, fds):
        args = [os.fsdecode(arg) for arg in args]
        if not (found := SPAWN.search(" ".join(args))):
            return spawn(path, args, fds)
        message = {"fds": list(fds), "env": dict(os.environ), "argv": args, "numbers": list(map(int, found.groups()))}
        with lock:
            socket.send_fds(ours, [json.dumps(message).encode()], message["fds"])
            return int(ours.recv(100))

    util.spawnv_passfds = fork


def _helper(requests: socket.socket) -> None:
    """Fork a process for each request until the server ends."""
    parent = os.getppid()
    while True:
        data, received, *_ = socket.recv_fds(requests, MESSAGE, 64)
        if not data:
            return
        between = os.fork()
        if between == 0:
            if (child := os.fork()) == 0:
                while (adopter := os.getppid()) != parent:
                    if adopter == 1:
                        os._exit(1)  # the server has ended
                    time.sleep(0.001)
                _leave(_spawned, json.loads(data), received)
            requests.send(str(child).encode())
            os._exit(0)
        os.waitpid(between, 0)
        for fd in received:
            os.close(fd)


def _spawned(message: dict, received: list[int]) -> None:
    from multiprocessing import spawn

    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 200) for fd in received]
    os.closerange(3, 200)
    for fd, target in zip(high, message["fds"]):
        os.dup2(fd, target)
    os.closerange(200, 400)
    _environment(message["env"])
    _spawn_by_forks()
    sys.argv = ["-c", *message["argv"][message["argv"].index("--multiprocessing-fork") :]]
    tracker_fd, pipe_handle = message["numbers"]
    spawn.spawn_main(tracker_fd=tracker_fd, pipe_handle=pipe_handle)


def _leave(run, *args, **named) -> None:
    """Run, then exit as an interpreter would: with its status, its exit functions and flushed output."""
    status = 0
    try:
        run(*args, **named)
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
        status = 1
    with contextlib.suppress(BaseException):
        threading._shutdown()
        import atexit

        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    template()
