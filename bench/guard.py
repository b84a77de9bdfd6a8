"""Ends a server when the process that started it is gone, however that went: interrupted, killed, or out of memory.

A server has a session of its own, so no signal of a terminal reaches it. The guard is a process that holds the reading
end of a pipe. The writing end is the starter's alone and closes with it.
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
    """To be made before the process group that it watches, so that nothing is ever unwatched."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-ISc", SCRIPT], stdin=subprocess.PIPE, start_new_session=True, text=True
        )

    def watch(self, group: int) -> None:
        self._say(str(group))

    def release(self) -> None:
        """The group has ended."""
        self._say("ended")
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def _say(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
