"""Free TCP ports for the measured servers.

A server is told its ports long before it listens. In the meantime the system may give ports from `ip_local_port_range`
(32768 and up on Linux) to outgoing connections, so these ports are below that range.
"""

from __future__ import annotations

import random
import socket

RANGE = range(10000, 21000)  # `bench.quality.policies` counts up from the end of this range
TAKEN = "address already in use"  # in the messages of uvicorn, torch and zmq; case varies


def are_free(*ports: int) -> bool:
    for port in ports:
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                return False
    return True


def free_ports(count: int) -> list[int]:
    """Distinct unbound ports, random from `RANGE`, so that concurrent callers get different ones.

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
