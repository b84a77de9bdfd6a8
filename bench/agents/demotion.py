"""Cache of the simulator that moves cold blocks to a lower format before it evicts any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .cache import Cache, Chain


@dataclass(eq=False)
class DemotingCache(Cache):
    """Cache without host memory. `capacity` counts blocks in the high format.

    `high`, `low`: bytes of a block in each format, fewer in the low one. Blocks are demoted in the order of eviction,
    the last blocks of a chain first. A demoted block stays so when it is used again.
    """

    high: int = 2
    low: int = 1
    demoted: int = 0  # blocks in the low format

    def make_room(self, blocks: int, now: float) -> bool:
        missing = (self.device + blocks - self.capacity) * self.high - self.demoted * (self.high - self.low)
        if missing <= 0:
            return True
        victims = [c for c in self.chains if c.device and not c.locks]
        if sum(self._bytes(c) for c in victims) < missing:
            return False
        missing -= self._demote(victims, missing, now)
        self._evict(victims, -(-missing // self.low), now)  # nothing, or blocks of chains that are all demoted
        for chain in victims:
            self._trim(chain)
        return True

    def _bytes(self, chain: Chain) -> int:
        return chain.device * self.high - chain.lowered.count(1) * (self.high - self.low)

    def _demote(self, victims: Sequence[Chain], missing: int, now: float) -> int:
        """Save `missing` bytes, or as many as possible. Returns how many were saved."""
        saved, saves = 0, self.high - self.low
        for chain in sorted(victims, key=lambda c: self.order.rank(c, now)):
            if saved >= missing:
                break
            due = [at for at, low in enumerate(chain.lowered) if not low][(saved - missing) // saves :]
            for at in due:
                chain.lowered[at] = 1
            self.demoted += len(due)
            saved += len(due) * saves
        return saved

    def _trim(self, chain: Chain) -> None:
        """Forget blocks that have left `chain`."""
        self.demoted -= chain.lowered.count(1, chain.device)
        del chain.lowered[chain.device :]

    def cut(self, chain: Chain, keep: int) -> Chain | None:
        rest = super().cut(chain, keep)
        if rest is not None:
            rest.lowered = chain.lowered[keep:]
            del chain.lowered[keep:]
        self._trim(chain)
        return rest

    def extend(self, chain: Chain, blocks: int) -> None:
        super().extend(chain, blocks)
        chain.lowered.extend(bytes(blocks - len(chain.lowered)))
