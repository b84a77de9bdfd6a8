"""TCP ports of this machine for the servers that are measured.

A server is told its ports long before it listens. The system gives ports from `ip_local_port_range` (32768 and up on
Linux) to any outgoing connection in between, so these are from below it.
"""

from __future__ import annotations

import random
import socket

RANGE = range(10000, 21000)  # `bench.quality.policies` counts up from behind them
TAKEN = "address already in use"  # so in uvicorn's message, torch's and zmq's, in some case of letters


def are_free(*ports: int) -> bool:
    for port in ports:
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                return False
    return True


def free_ports(count: int) -> list[int]:
    """Different ports that nothing has bound, any of `RANGE`: processes that ask at once get others.

    Raises:
        OSError: fewer than `count` are free.
    """
    # Not the shared generator: tests seed it, and would all get the same ports.
    shuffled = random.SystemRandom().sample(RANGE, len(RANGE))
    found: list[int] = []
    for port in shuffled:
        if are_free(port):
            found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"Fewer than {count} of the ports {RANGE.start} to {RANGE.stop - 1} are free; stop what has them.")
