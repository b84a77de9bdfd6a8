"""`--kvc-running-share`: the share of the memory that running requests may hold when a prompt needs an eviction.

Decode steps stall while prompts are computed. Requests that compute much therefore run for long, and hold memory that
paused sessions need, whose prompts must then be computed, too. A limit keeps memory for paused sessions.

Unless the operator gives one, the limit applies only while many prompt tokens are computed again. A ghost list (Megiddo
and Modha, ARC, 2003) tells which are: it remembers dropped prefixes without their blocks.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field

LIMIT = 0.5  # the server's own share
# Share of the prompt tokens that are computed again. The limit begins above the first and ends below the second. If it
# is above the last when the limit has had time to work, the limit does not help.
BEGIN, END, USELESS = 0.2, 0.05, 0.6
# In prompt tokens, as multiples of the tokens that the memory holds:
TRIAL = 8.0  # until a limit has had time to work
RETRY = 32.0  # until a limit that did not help is tried again
REMEMBERED = 8.0  # in dropped prefixes


@dataclass
class GhostList:
    """Prefixes that the radix tree dropped, each by the node that it continued and the first block of its tokens.

    The earliest are forgotten beyond `limit` tokens in total.
    """

    limit: float = 0.0
    tokens: int = 0
    _ghosts: OrderedDict[tuple[int, int], int] = field(default_factory=OrderedDict)
    _below: defaultdict[int, set[tuple[int, int]]] = field(default_factory=lambda: defaultdict(set))  # by node

    def add(self, node: int, parent: int, block: Hashable, tokens: int) -> None:
        """The leaf `node` with `tokens` tokens, `block` first, was dropped below `parent`. The longest ghost that
        continues the leaf becomes a part of the leaf's ghost."""
        tokens += max([self._remove(ghost) for ghost in list(self._below.get(node, ()))], default=0)
        ghost = (parent, hash(block))
        self._remove(ghost)
        self._ghosts[ghost] = tokens
        self._below[parent].add(ghost)
        self.tokens += tokens
        while self.tokens > self.limit:
            self._remove(next(iter(self._ghosts)))

    def take(self, node: int, block: Hashable) -> int:
        """Remove the ghost that continues `node` with `block`, and return its tokens; 0 if there is none."""
        return self._remove((node, hash(block)))

    def clear(self) -> None:
        self.tokens = 0
        self._ghosts.clear()
        self._below.clear()

    def _remove(self, ghost: tuple[int, int]) -> int:
        tokens = self._ghosts.pop(ghost, 0)
        if tokens:
            self.tokens -= tokens
            siblings = self._below[ghost[0]]
            siblings.remove(ghost)
            if not siblings:
                del self._below[ghost[0]]
        return tokens


@dataclass
class RunningShare:
    """Decides the share.

    given: the operator's share; None: the server decides.
    again: share of recent prompt tokens that are computed again.
    since: prompt tokens since the limit began or ended, as a multiple of the tokens that the memory holds.
    """

    given: float | None
    ghosts: GhostList = field(default_factory=GhostList)
    again: float = 0.0
    limited: bool = False
    since: float = 0.0
    wait: float = 0.0  # value of `since` before which the limit does not begin

    @property
    def now(self) -> float:
        if self.given is not None:
            return self.given
        return LIMIT if self.limited else 1.0

    def drop(self, node: int, parent: int, block: Hashable, tokens: int, memory: float) -> None:
        """Remember a dropped leaf, see `GhostList.add`. `memory`: tokens that the memory holds."""
        self.ghosts.limit = REMEMBERED * memory
        self.ghosts.add(node, parent, block, tokens)

    def admit(self, tokens: int, again: int, memory: float) -> None:
        """A prompt of `tokens` tokens was admitted, of which `again` are computed again. `memory`: tokens that the
        memory holds; `self.again` is a moving average over as many."""
        part = tokens / max(memory, tokens)
        self.again += (again / tokens - self.again) * part
        self.since += part
        if self.limited:
            useless = self.again > USELESS and self.since > TRIAL
            if useless or self.again < END:
                self.limited, self.since, self.wait = False, 0.0, RETRY if useless else 0.0
        elif self.again > BEGIN and self.since >= self.wait:
            self.limited, self.since = True, 0.0
