"""`--kvc-running-share`: the share of the memory that running requests may hold when a prompt needs an eviction.

Decode steps stall while prompts are computed. Requests that compute much therefore run for long, and hold memory that
paused sessions need, whose prompts must then be computed, too. A limit keeps memory for paused sessions. It also runs
fewer requests in each decode step, so it pays only if it saves more time in prefills than it costs in decode steps.

Unless the operator gives a share, the limit begins when prompt tokens that had been dropped take longer to compute than
all decode steps. It stays only if the work for an output token falls. Work is counted in tokens, not in time, so that
tensor-parallel ranks decide alike.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field

LIMIT = 0.5  # the server's own share
STEP = 256  # prompt tokens whose prefill takes about as long as a decode step
END = 0.1  # the limit ends if dropped tokens take less than this share of the time of decode steps
GAIN = 0.9  # the limit ends if the work for an output token is more than this share of the work before
# In spans, each with as many prompt tokens as the memory holds:
SETTLE = 3  # over which work is compared; in all of them dropped tokens take longer before a limit begins
AGAIN = 1  # after which a limit begins again that ended because few dropped tokens were left
TRIAL = 8  # after which a limit is judged
PAUSE, MAX_PAUSE = 8, 64  # after a limit that did not help; doubled each time
RENEWAL = 128  # after which a limit ends, because the work before it may be outdated
PATIENCE = 8.0  # of other prompts, after which a prompt no longer waits for running requests
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
class Work:
    """Work of a span.

    prompts: prompt tokens, cached ones included. computed: those that were computed. again: those that were computed
    although the cache had held them. steps: decode steps. decoded: tokens of these steps.
    """

    prompts: int = 0
    computed: int = 0
    again: int = 0
    steps: int = 0
    decoded: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(astuple(self), astuple(other))))

    @property
    def per_token(self) -> float:
        """Work for an output token, in prompt tokens."""
        return (self.computed + STEP * self.steps) / max(1, self.decoded)

    @property
    def again_to_steps(self) -> float:
        """Time to compute dropped tokens, relative to that of decode steps."""
        return self.again / (STEP * max(1, self.steps))


@dataclass
class RunningShare:
    """Decides the share.

    given: the operator's share; None: the server decides.
    admitted: prompt tokens since start, as a multiple of the tokens that the memory holds.
    work: that of the present span. past: that of the `SETTLE` spans before it.
    spans: complete spans since the limit began or ended.
    """

    given: float | None
    ghosts: GhostList = field(default_factory=GhostList)
    admitted: float = 0.0
    work: Work = field(default_factory=Work)
    past: deque[Work] = field(default_factory=lambda: deque(maxlen=SETTLE))
    limited: bool = False
    spans: int = 0
    wait: int = SETTLE  # spans before the limit may begin, in the last of which dropped tokens take longer
    pause: int = PAUSE  # after the next limit that does not help
    before: float = 0.0  # work for an output token before the limit

    @property
    def now(self) -> float:
        if self.given is not None:
            return self.given
        return LIMIT if self.limited else 1.0

    def drop(self, blocks: Sequence[int], memory: float) -> None:
        """The tree dropped successive blocks with these hashes. `memory`: blocks that the memory holds."""
        self.ghosts.limit = min(MAX_GHOSTS, int(REMEMBERED * memory))
        self.ghosts.add(blocks)

    def decode(self, requests: int) -> bool:
        """A decode step of `requests` requests. Returns whether the limit has ended with it: steps go on while all
        prompts wait."""
        work = self.work
        work.steps += 1
        work.decoded += requests
        if not self.limited:
            return False
        last = self.past[-1]
        if last.again + work.again >= END * STEP * (last.steps + work.steps):
            return False
        self._end(AGAIN)
        self.pause = PAUSE
        return True

    def admit(self, tokens: int, computed: int, again: int, memory: float) -> None:
        """A prompt of `tokens` tokens was admitted, of which `computed` are computed, and `again` of these had been
        dropped. `memory`: tokens that the memory holds."""
        self.admitted += tokens / memory
        self.work.prompts += tokens
        self.work.computed += computed
        self.work.again += again
        if self.work.prompts >= memory:
            self._end_span()

    def _end_span(self) -> None:
        self.spans += 1
        self.past.append(self.work)
        self.work = Work()
        if self.given is not None:
            return
        per_token = sum(self.past, Work()).per_token
        if not self.limited:
            # In several spans, because a very long prompt, or many at once, put off the decode steps of a span.
            wait = self.wait if self.spans <= PAUSE else max(self.wait, SETTLE)  # an early limit proves little by now
            recent = [*self.past][-wait:]
            if self.spans >= wait and min(span.again_to_steps for span in recent) > 1:
                self.limited, self.spans = True, 0
                self.before = self.before if wait == AGAIN else per_token
        elif self.spans >= TRIAL and per_token > GAIN * self.before:
            self._end(self.pause)
            self.pause = min(MAX_PAUSE, 2 * self.pause)
        elif self.spans >= RENEWAL:
            self._end(SETTLE)

    def _end(self, wait: int) -> None:
        self.limited, self.spans, self.wait = False, 0, wait
