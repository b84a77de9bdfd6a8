"""Ends a server when the process that started it is gone, whether interrupted, killed, or out of memory.

A server has its own session, so signals from a terminal do not reach it. The guard is a process that holds the reading
end of a pipe. Only the starter has the writing end, which closes when the starter ends.
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
    """A watch on a process group. Create it before the group, so that the group is never unwatched."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-ISc", SCRIPT], stdin=subprocess.PIPE, start_new_session=True, text=True
        )

    def watch(self, group: int) -> None:
        self._say(str(group))

    def release(self) -> None:
        """End the watch, because the group has ended."""
        self._say("ended")
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def _say(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
