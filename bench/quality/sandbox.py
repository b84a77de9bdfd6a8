"""Sandbox for programs that a model wrote.

A program runs in a separate process and folder, without site packages, with limits on time, memory and files. The
limits stop accidents, not attacks. The time limit counts CPU time, because cells share the machine. A program that only
sleeps is killed after four times as many seconds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

SECONDS = 5
MEMORY = 2 << 30
ENDED = 77  # exit code after the last line; a program that exits earlier has another one
RUNNER = f"""
import os, resource, sys
for what, limit in ((resource.RLIMIT_CPU, int(sys.argv[2])), (resource.RLIMIT_AS, {MEMORY}),
                    (resource.RLIMIT_FSIZE, 1 << 20), (resource.RLIMIT_CORE, 0)):
    resource.setrlimit(what, (limit, limit))
exec(compile(open(sys.argv[1]).read(), "program", "exec"), {{"__name__": "__main__"}})
os._exit({ENDED})
"""


def succeeds(program: str, seconds: int = SECONDS) -> bool:
    """Whether the program reaches its end without an exception."""
    with tempfile.TemporaryDirectory(prefix="kvc-code-") as folder:
        file = Path(folder) / "program.py"
        file.write_text(program, errors="replace")
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", RUNNER, str(file), str(seconds)],
            cwd=folder,
            env={},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return process.wait(4 * seconds) == ENDED
        except subprocess.TimeoutExpired:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with its child processes
            process.wait()
