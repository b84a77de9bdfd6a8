"""Expected reuse: the eviction order of sessions, by when a prompt is expected to need their blocks.

Time is counted in forwards, because tensor-parallel ranks agree on their number but not on the clock.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

GAIN = 0.25  # weight of a session's last pause in its typical pause
PRIOR_GAIN = 1 / 512  # weight of a pause in the typical pause of all sessions
FIRST_PAUSE = 1000  # forwards; a server's typical pause before it has seen one


@dataclass(eq=False, slots=True)
class Use:
    """The state of one session.

    log_pause: running mean of the logarithms of its pauses.
    prompt: tokens of its last prompt.
    ended: number of forwards when its last request ended.
    busy: one of its requests waits or runs.
    place: arrival number of its waiting prompt; None if none waits.
    done: its client said that no prompt will continue the last one.
    leaf: last node of the tree that its last prompt found or left.
    """

    log_pause: float
    prompt: int = 0
    ended: int = 0
    busy: bool = True
    place: int | None = None
    done: bool = False
    leaf: Any = None

    def rank(self) -> tuple[int, float]:
        """Rank of the session's blocks; the lowest is evicted first. Finished sessions come first, then paused ones by
        the chance of a next prompt, then sessions with a waiting prompt, the last in line first.

        Pauses are modeled as exponential, with a gamma prior on the rate. After a pause of s forwards, the rate of
        return is proportional to 1 / (b + s), where b is the session's typical pause. The order by that rate is the
        order of `ended - b`, which does not change during a pause.
        """
        if self.place is not None:
            return 1, -self.place
        if self.done:
            return -1, self.ended
        return 0, self.ended - math.exp(self.log_pause)


def use_of(node: Any) -> Use | None:
    """The session that last used a node of the tree, if known."""
    return getattr(node, "kvc_use", None)


@dataclass
class Sessions:
    """The sessions of one server, recognized by their prompts.

    log_pause: running mean of the logarithms of all pauses.
    waiting: sessions whose prompts wait.
    """

    block_tokens: int
    log_pause: float = math.log(FIRST_PAUSE)
    waiting: dict[Use, None] = field(default_factory=dict)
    places: Iterator[int] = field(default_factory=itertools.count)

    def arrive(self, before: Use | None, prompt: int, cached: int, now: int) -> Use:
        """The session of a prompt of `prompt` tokens that hits `cached` tokens, last used by `before`.

        It is `before` if the prompt continues that session's last prompt, up to one block, and no request of the
        session waits or runs. Otherwise it is a new one.
        """
        if before is None or before.busy or cached < before.prompt - self.block_tokens:
            use = Use(self.log_pause)
        else:
            use, pause = before, math.log(max(1, now - before.ended))
            use.log_pause += GAIN * (pause - use.log_pause)
            self.log_pause += PRIOR_GAIN * (pause - self.log_pause)
            use.busy, use.done = True, False
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

    def interrupt(self, use: Use, now: int) -> None:
        """The running request of `use` goes back to the end of the line."""
        use.ended, use.place = now, next(self.places)

    @staticmethod
    def end(use: Use, now: int, done: bool) -> None:
        """The request of `use` has ended."""
        use.busy, use.ended, use.done, use.place = False, now, done, None
