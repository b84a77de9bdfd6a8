"""Free TCP ports for benchmark servers.

A server gets its ports long before it listens on them. Meanwhile, the system may use ports of `ip_local_port_range`
(from 32768 on Linux) for outgoing connections, so these ports are below that range.
"""

from __future__ import annotations

import random
import socket

RANGE = range(10000, 21000)  # `bench.quality.policies` counts up from the end of this range
TAKEN = "address already in use"  # part of the messages of uvicorn, torch and zmq, with varying case


def are_free(*ports: int) -> bool:
    for port in ports:
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                return False
    return True


def free_ports(count: int) -> list[int]:
    """Distinct free ports, drawn at random from `RANGE`, so that concurrent callers rarely collide.

    Raises:
        OSError: fewer than `count` are free.
    """
    # Tests seed the global generator, so it would return the same ports to all of them.
    shuffled = random.SystemRandom().sample(RANGE, len(RANGE))
    ports: list[int] = []
    for port in shuffled:
        if are_free(port):
            ports.append(port)
        if len(ports) == count:
            return ports
    problem = f"Fewer than {count} of the ports {RANGE.start} to {RANGE.stop - 1} are free"
    raise OSError(f"{problem}; stop the processes that use them.")
