"""Expected reuse: the eviction order of sessions, by when a prompt is expected to need their blocks.

Pauses are counted in forwards, because tensor-parallel ranks agree on their number but not on the clock. Times to live
are in seconds, by a clock that the ranks share.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

GAIN = 0.25  # weight of a session's last pause in its typical pause
PRIOR_GAIN = 1 / 512  # weight of a pause in the typical pause of all sessions
FIRST_PAUSE = 1000  # forwards; a server's typical pause before it has seen one
MOST_USES = 8  # sessions that a node of the tree remembers
MOST_DEADLINES = 4096  # sessions with a time to live; those of abandoned sessions would add up
CLOCK_CALLS = 8
UNKNOWN = (0, -math.inf, 0.0)  # rank of blocks that no request has used


@dataclass(frozen=True)
class _Previous:
    """State of a session before a request. life, deadline: of its time to live, if it has one."""

    prompt: int
    done: bool
    log_pause: float
    priority: float
    life: float | None
    deadline: float | None


@dataclass(eq=False, slots=True)
class Use:
    """The state of one session.

    log_pause: running mean of the logarithms of its pauses, per step.
    prompt: tokens of its last prompt.
    ended: number of forwards when its last request ended.
    busy: one of its requests waits or runs.
    place: arrival number of its waiting prompt; None if none waits.
    done: no prompt is expected to continue the last one, because its client said so or its time to live has passed.
    leaf: last node of the tree that its last prompt found or left.
    priority: of its last request; the larger, the longer its blocks stay.
    steps: steps of its workflow until it runs again; 1 if its client gave none.
    previous: its state before its last request, which may be aborted before it runs.
    """

    log_pause: float
    prompt: int = 0
    ended: int = 0
    busy: bool = True
    place: int | None = None
    done: bool = False
    leaf: Any = None
    priority: float = 0.0
    steps: int = 1
    previous: _Previous | None = None

    def rank(self) -> tuple[int, float, float]:
        """Rank of the session's blocks; the lowest is evicted first. Finished sessions come first, then paused ones by
        the chance of a next prompt, then sessions with a waiting prompt, the last in line first. Within each of the
        three classes, sessions with a lower priority come first.

        Pauses are modeled as exponential, with a gamma prior on the rate. After a pause of s forwards, the rate of
        return is proportional to 1 / (b + s), where b is the session's typical pause per step, times its steps. The
        order by that rate is the order of `ended - b`, which does not change during a pause.
        """
        if self.place is not None:
            return 1, self.priority, -self.place
        if self.done:
            return -1, self.priority, self.ended
        return 0, self.priority, self.ended - self.steps * math.exp(self.log_pause)


def uses_of(node: Any) -> tuple[Use, ...]:
    """The sessions that last used a node of the tree, as far as known, the latest last."""
    return getattr(node, "kvc_uses", ())


def add_use(node: Any, use: Use) -> None:
    """Record that a session uses a node of the tree. Finished sessions and the oldest ones are forgotten."""
    uses = uses_of(node)
    if uses[-1:] != (use,):
        others = [other for other in uses if other is not use and not other.done]
        node.kvc_uses = (*others[1 - MOST_USES :], use)


def rank_of(node: Any) -> tuple[int, float, float]:
    """Rank of a node of the tree: that of the session that needs it soonest."""
    return max((use.rank() for use in uses_of(node)), default=UNKNOWN)


@dataclass
class Sessions:
    """The sessions of one server, recognized by their prompts.

    log_pause: running mean of the logarithms of all pauses, per step.
    waiting: sessions whose prompts wait.
    lives: times to live, in seconds, of sessions that have ended since the clock was read.
    deadlines: times at which sessions expire, at most MOST_DEADLINES of them.
    due: the earliest deadline or an earlier time.
    calls: of `expire` with a time to live under way.
    """

    block_tokens: int
    log_pause: float = math.log(FIRST_PAUSE)
    waiting: dict[Use, None] = field(default_factory=dict)
    lives: dict[Use, float] = field(default_factory=dict)
    deadlines: dict[Use, float] = field(default_factory=dict)
    due: float = math.inf
    calls: int = 0
    places: Iterator[int] = field(default_factory=itertools.count)

    def arrive(self, before: Use | None, prompt: int, cached: int, now: int) -> Use:
        """The session of a prompt of `prompt` tokens that hits `cached` tokens, last used by `before`.

        It is `before` if the prompt continues that session's last prompt, up to one block, and no request of the
        session waits or runs. Otherwise it is a new one.
        """
        if before is None or before.busy or cached < before.prompt - self.block_tokens:
            use = Use(self.log_pause)
        else:
            use, pause = before, math.log(max(1, now - before.ended) / max(1, before.steps))
            use.previous = _Previous(
                use.prompt, use.done, use.log_pause, use.priority, self.lives.get(use), self.deadlines.get(use)
            )
            use.log_pause += GAIN * (pause - use.log_pause)
            self.log_pause += PRIOR_GAIN * (pause - self.log_pause)
            use.busy, use.done = True, False
            for times in (self.lives, self.deadlines):
                times.pop(use, None)
        use.prompt = prompt
        return use

    def wait(self, uses: Iterable[Use]) -> list[Use]:
        """Set the sessions whose prompts wait; returns the sessions whose prompts have left the queue."""
        waiting = dict.fromkeys(uses)
        gone = [use for use in self.waiting if use not in waiting]
        for use in gone:
            use.place = None
        for use in waiting:
            if use.place is None:
                use.place = next(self.places)
        self.waiting = waiting
        return gone

    def abandon(self, use: Use) -> None:
        """The request of `use` was aborted before it ran. The session is as it was before it arrived, so that another
        try continues it."""
        use.busy = False
        if (previous := use.previous) is None:  # it was new
            use.prompt, use.done = 0, False
            return
        use.prompt, use.done = previous.prompt, previous.done
        use.log_pause, use.priority = previous.log_pause, previous.priority
        if previous.life is not None:
            self.lives[use] = previous.life
        if previous.deadline is not None:
            self.deadlines[use] = previous.deadline
            self.due = min(self.due, previous.deadline)

    def interrupt(self, use: Use, now: int) -> None:
        """The running request of `use` goes back to the end of the line."""
        use.ended, use.place = now, next(self.places)

    def end(self, use: Use, now: int, done: bool, ttl: float | None = None, steps: int | None = None) -> None:
        """The request of `use` has ended, with the hints of its client."""
        use.busy, use.ended, use.done, use.place = False, now, done, None
        use.steps = 1 if steps is None else steps
        if ttl is not None and not done:
            self.lives[use] = ttl

    def expire(self, clock: Callable[[], float]) -> list[Use]:
        """Finish the sessions whose time to live has passed, and return them. If there are more than MOST_DEADLINES,
        the first ones lose theirs.

        `clock` may be a collective operation. It is read at every CLOCK_CALLS-th call, if a session has a time to live.
        That time begins when the clock is first read after the session's end.
        """
        if not self.lives and not self.deadlines:
            return []
        self.calls += 1
        if self.calls % CLOCK_CALLS:
            return []
        seconds = clock()
        self.deadlines |= {use: seconds + ttl for use, ttl in self.lives.items()}
        self.due = min([self.due, *(self.deadlines[use] for use in self.lives)])
        self.lives.clear()
        for use in [*itertools.islice(self.deadlines, max(0, len(self.deadlines) - MOST_DEADLINES))]:
            del self.deadlines[use]
        if seconds < self.due:
            return []
        expired = [use for use, deadline in self.deadlines.items() if deadline <= seconds]
        for use in expired:
            use.done = True
            del self.deadlines[use]
        self.due = min(self.deadlines.values(), default=math.inf)
        return expired
