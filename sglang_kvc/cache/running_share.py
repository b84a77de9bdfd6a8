"""`--kvc-running-share`: the share of the memory that running requests may hold when a prompt needs an eviction.

Decode steps stall while prompts are computed. Requests that compute much therefore run for long, and hold memory that
paused sessions need, whose prompts must then be computed, too. A limit keeps memory for paused sessions. It also runs
fewer requests in each decode step, so it pays only if it saves more time in prefills than it costs in decode steps.

Unless the operator gives a share, the limit begins when prompt tokens that had been dropped take longer to compute than
all decode steps. It stays only if the work for an output token falls. Work is counted in tokens, not in time, so that
tensor-parallel ranks decide alike.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

LIMIT = 0.5  # the server's own share
STEP = 256  # prompt tokens whose prefill takes about as long as a decode step
END = 0.1  # the limit ends if dropped tokens take less than this share of the time of decode steps
GAIN = 0.9  # the limit ends if the work for an output token is more than this share of the work before
# In prompt tokens, as multiples of the tokens that the memory holds:
SETTLE = 1.0  # before a limit begins, so that the work before it is known
TRIAL = 8.0  # before a limit is judged
PAUSE, MAX_PAUSE = 8.0, 64.0  # after a limit that did not help; doubled each time
REMEMBERED = 8.0  # in dropped blocks

MAX_GHOSTS = 1 << 18


class GhostList:
    """Blocks that the radix tree dropped, by a hash of all tokens up to their end (a ghost list, as in ARC of Megiddo
    and Modha, 2003). The earliest are forgotten beyond `limit` blocks."""

    def __init__(self) -> None:
        self.limit = 0
        self._ghosts: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ghosts)

    def add(self, blocks: Sequence[int]) -> None:
        """Remember successive blocks. The last is forgotten first, because a hit ends at a missing block."""
        for block in reversed(blocks):
            self._ghosts[block] = None
            self._ghosts.move_to_end(block)
        while len(self._ghosts) > self.limit:
            self._ghosts.popitem(last=False)

    def take(self, blocks: Iterable[int]) -> int:
        """Number of the first of these successive blocks that are ghosts; they are none any more."""
        taken = 0
        for block in blocks:
            if block not in self._ghosts:
                break
            del self._ghosts[block]
            taken += 1
        return taken


@dataclass
class Recent:
    """Work since start, in which earlier work counts less: it has a weight of 1/e after as many prompt tokens as the
    memory holds.

    computed: prompt tokens that were computed. again: those of them that had been dropped. steps: decode steps.
    decoded: tokens of these steps.
    """

    computed: float = 0.0
    again: float = 0.0
    steps: float = 0.0
    decoded: float = 0.0

    def admit(self, part: float, computed: int, again: int) -> None:
        """A prompt with `part` of the tokens that the memory holds was admitted."""
        for name in ("computed", "again", "steps", "decoded"):
            setattr(self, name, getattr(self, name) * (1 - part))
        self.computed += computed
        self.again += again

    @property
    def work(self) -> float:
        """Work for an output token, in prompt tokens."""
        return (self.computed + STEP * self.steps) / max(1.0, self.decoded)

    @property
    def again_to_steps(self) -> float:
        """Time to compute dropped tokens, relative to that of decode steps."""
        return self.again / (STEP * max(1.0, self.steps))


@dataclass
class RunningShare:
    """Decides the share.

    given: the operator's share; None: the server decides.
    since: prompt tokens since the limit began or ended, as a multiple of the tokens that the memory holds.
    """

    given: float | None
    ghosts: GhostList = field(default_factory=GhostList)
    recent: Recent = field(default_factory=Recent)
    limited: bool = False
    since: float = 0.0
    wait: float = SETTLE  # value of `since` before which the limit does not begin
    pause: float = PAUSE  # after the next limit that does not help
    before: float = 0.0  # work for an output token when the limit began

    @property
    def now(self) -> float:
        if self.given is not None:
            return self.given
        return LIMIT if self.limited else 1.0

    def drop(self, blocks: Sequence[int], memory: float) -> None:
        """The tree dropped successive blocks with these hashes. `memory`: blocks that the memory holds."""
        self.ghosts.limit = min(MAX_GHOSTS, int(REMEMBERED * memory))
        self.ghosts.add(blocks)

    def decode(self, requests: int) -> None:
        """A decode step of `requests` requests."""
        self.recent.steps += 1
        self.recent.decoded += requests

    def admit(self, tokens: int, computed: int, again: int, memory: float) -> None:
        """A prompt of `tokens` tokens was admitted, of which `computed` are computed, and `again` of these had been
        dropped. `memory`: tokens that the memory holds."""
        part = tokens / max(memory, tokens)
        self.recent.admit(part, computed, again)
        self.since += part
        if not self.limited:
            if self.recent.again_to_steps > 1 and self.since >= self.wait:
                self.limited, self.since, self.before = True, 0.0, self.recent.work
        elif self.recent.again_to_steps < END:
            self.limited, self.since, self.wait, self.pause = False, 0.0, SETTLE, PAUSE
        elif self.since > TRIAL and self.recent.work > GAIN * self.before:
            self.limited, self.since, self.wait = False, 0.0, self.pause
            self.pause = min(MAX_PAUSE, 2 * self.pause)
