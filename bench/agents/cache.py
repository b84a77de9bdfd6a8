"""Cache of the simulator: chains of blocks in device and host memory.

A chain has the cached blocks of a session, or of tool definitions that sessions share. It loses blocks from its end,
like leaves of a radix tree. Blocks evicted from the device go to host memory, if there is any.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .orders import INFINITE, Order

BLOCK = 128  # tokens


@dataclass(eq=False)
class Chain:
    """Consecutive blocks: `[0, device)` are on the device and `[device, stored)` in host memory. A session's chain
    starts at the end of `parent`, the tool definitions. Times are in seconds unless stated otherwise."""

    parent: Chain | None = None
    device: int = 0
    stored: int = 0
    locks: int = 0
    used: float = 0.0  # last start or end of a request
    ended: float = 0.0  # end of the last request, in forwards
    waits_since: float | None = None  # arrival of the waiting request
    next_arrival: float = INFINITE
    hits: int = 0
    dead: bool = False  # the session has ended or no longer needs these blocks
    pause: float = 0.0  # typical pause of the session per step, in forwards, estimated from earlier pauses
    steps: int = 1  # steps until the next prompt, by the client's hint
    children: dict[Chain, None] = field(default_factory=dict)
    lowered: bytearray = field(default_factory=bytearray)  # 1 per demoted block on the device, if any may be

    def __post_init__(self):
        if self.parent is not None:
            self.parent.children[self] = None


@dataclass
class Cache:
    """Cache with `capacity` blocks on the device and `host_capacity` in host memory. `device`, `host`: blocks in
    use."""

    capacity: int
    host_capacity: int
    order: Order
    chains: dict[Chain, None] = field(default_factory=dict)  # a set would change the order of equal ranks
    device: int = 0
    host: int = 0

    def lock(self, chain: Chain) -> None:
        for c in (chain, chain.parent):
            if c is not None:
                c.locks += 1

    def unlock(self, chain: Chain) -> None:
        for c in (chain, chain.parent):
            if c is not None:
                c.locks -= 1

    def make_room(self, blocks: int, now: float) -> bool:
        """Evict until `blocks` blocks are free. Return False, without evictions, if that is impossible."""
        missing = self.device + blocks - self.capacity
        if missing <= 0:
            return True
        victims = [c for c in self.chains if c.device and not c.locks]
        if sum(c.device for c in victims) < missing:
            return False
        self._evict(victims, missing, now)
        return True

    def _evict(self, victims: list[Chain], missing: int, now: float) -> None:
        """Evict `missing` blocks of the unlocked chains `victims`, which have as many."""
        while missing > 0:
            # A shared chain is a leaf if none of its children is on the device.
            leaves = [c for c in victims if c.device and not any(child.device for child in c.children)]
            for chain in sorted(leaves, key=lambda c: self.order.rank(c, now)):
                evicted = min(missing, chain.device)
                chain.device -= evicted
                self.device -= evicted
                missing -= evicted
                if self.host_capacity:
                    self.host += evicted
                else:
                    chain.stored = chain.device
                    self._forget(chain)
                if missing <= 0:
                    break
        self._trim_host(now)

    def _trim_host(self, now: float) -> None:
        while self.host > self.host_capacity:
            leaves = [
                c for c in self.chains if c.stored > c.device and not any(child.stored for child in c.children)
            ]
            for chain in sorted(leaves, key=lambda c: self.order.rank(c, now)):
                evicted = min(self.host - self.host_capacity, chain.stored - chain.device)
                chain.stored -= evicted
                self.host -= evicted
                self._forget(chain)
                if self.host <= self.host_capacity:
                    return

    def _forget(self, chain: Chain) -> None:
        if not chain.stored and not chain.locks:
            self.chains.pop(chain, None)

    def cut(self, chain: Chain, keep: int) -> Chain | None:
        """Detach the blocks after the first `keep`, because the session continues without them. They stay until they
        are evicted, in the chain that is returned. A single block, the partly filled end of every prompt, is freed."""
        device, stored = min(chain.device, keep), min(chain.stored, keep)
        on_device, on_host = chain.device - device, chain.stored - chain.device - (stored - device)
        chain.device, chain.stored = device, stored
        if on_device + on_host <= 1:
            self.device -= on_device
            self.host -= on_host
            return None
        rest = Chain(chain.parent, on_device, on_device + on_host, used=chain.used, ended=chain.ended, dead=True)
        self.chains[rest] = None
        return rest

    def extend(self, chain: Chain, blocks: int) -> None:
        """Extend the locked `chain` to `blocks` blocks on the device, which has room for them."""
        self.device += blocks - chain.device
        self.host -= chain.stored - chain.device
        chain.device = chain.stored = blocks
        self.chains[chain] = None
