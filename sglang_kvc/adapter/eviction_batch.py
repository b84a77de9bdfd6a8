"""Eviction batch: the blocks of all nodes that one eviction drops are saved and released together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from ..cache.runtime import Runtime


class EvictionBatch:
    """Blocks that the eviction under way has freed. SGLang evicts one node after the other and looks at the free memory
    after each. The blocks therefore count as available at once, but keep their ids and pages until the end of the
    eviction. Nothing takes a block before that.

    The batch ends with one save per size of record and one release. A save and a release per node would take the
    scheduler's thread about 50 us more for each node.
    """

    def __init__(self, runtime: Runtime):
        self.runtime = runtime
        self.is_open = False
        self._blocks: list[np.ndarray] = []
        self._pages = self._num_blocks = 0

    @property
    def available_tokens(self) -> int:
        """Tokens that an allocation gets at the end of the eviction."""
        return self.runtime.capacity.available_tokens(self._pages, self._num_blocks)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Context of an eviction. SGLang never begins one inside another. Everything that was evicted is saved and
        freed, even if the eviction fails."""
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False
            self._finish()

    def save(self, blocks: np.ndarray) -> np.ndarray:
        """Save `blocks` in host memory; returns the ids of the stored blocks. See `HostTier.save`."""
        tier = self.runtime.host_tier
        return tier.plan_save(blocks) if self.is_open else tier.save(blocks)

    def free(self, blocks: np.ndarray) -> None:
        """Free `blocks`."""
        if not self.is_open:
            return self.runtime.free(blocks)
        self._blocks.append(blocks)
        self._pages += int(self.runtime.ledger.charge[blocks].sum())
        self._num_blocks += len(blocks)

    def _finish(self) -> None:
        if self.runtime.host_tier is not None:
            self.runtime.host_tier.queue_saves()
        blocks, self._blocks, self._pages, self._num_blocks = self._blocks, [], 0, 0
        if blocks:
            self.runtime.free(np.concatenate(blocks))
