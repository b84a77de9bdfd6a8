"""Guard that ends a server when the process that started it exits, even if that process is killed.

A server has its own session, so signals from a terminal do not reach it. The guard is a process that reads from a pipe.
Only the starter has the writing end, which closes when the starter exits.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys

SCRIPT = """
import os, signal, sys, time

group = sys.stdin.readline().strip()
if group and sys.stdin.readline() == "":
    for sig, seconds in ((signal.SIGTERM, 5), (signal.SIGKILL, 0)):
        try:
            os.killpg(int(group), sig)
        except ProcessLookupError:
            break
        time.sleep(seconds)
"""


class Guard:
    """Guard of a process group. Create it before the group, so that the group is always guarded."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-ISc", SCRIPT], stdin=subprocess.PIPE, start_new_session=True, text=True
        )

    def watch(self, group: int) -> None:
        self._send(str(group))

    def release(self) -> None:
        """Stop the guard after the group has ended."""
        self._send("ended")
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def _send(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
