"""Compared orders of eviction, and of admission of waiting prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cache import Chain
    from .simulate import Turn

INFINITE = float("inf")
STEP = 10.0  # seconds of a step of a workflow

# ---- eviction: the lowest rank first. Only `clairvoyant` knows the future.


class Order:
    """Least recently used first."""

    told = False  # whether clients name the session of a prompt and mark its last prompt

    def rank(self, c: Chain, now: float) -> Any:
        return c.used

    def steps(self, pause: float) -> int:
        """Steps that a client gives as a hint if its session will pause for `pause` seconds; 1: it gives none."""
        return 1


class Lfu(Order):
    """SGLang's `lfu`: least frequently used first."""

    def rank(self, c, now):
        return c.hits, c.used


class Slru(Order):
    """SGLang's `slru`: blocks used only once first."""

    def rank(self, c, now):
        return c.hits >= 2, c.used


class Mru(Order):
    """SGLang's `mru`: most recently used first."""

    def rank(self, c, now):
        return -c.used


class Waiting(Order):
    """SGLang's `lru`, in which a waiting prompt counts as a use: chains of waiting prompts go last, the latest arrival
    first among them."""

    def rank(self, c, now):
        return (0, c.used) if c.waits_since is None else (1, -c.waits_since)


class Reuse(Order):
    """The session that is least likely to return first.

    Pauses are modeled as exponential, with a gamma prior on the rate. After a pause of s, the expected rate of return
    is proportional to 1 / (b + s), where b is `weight` times the session's typical pause per step and its steps.
    Sorting by this rate equals sorting by `ended - b`, which does not change with time. Chains of waiting prompts go
    last.
    """

    def __init__(self, weight: float = 1.0):
        self.weight = weight

    def rank(self, c, now):
        if c.waits_since is not None:
            return 1, -c.waits_since
        if self.told and c.dead:
            return -1, c.ended
        return 0, c.ended - self.weight * c.pause * c.steps


class Told(Reuse):
    """Like `Reuse`, but clients name the session of a prompt and mark its last prompt."""

    told = True


class Planned(Told):
    """Like `Told`, and clients also know the number of steps until each session's next prompt."""

    def steps(self, pause):
        return round(pause / STEP)


class Expiring(Reuse):
    """Like `Reuse`, but a session that has paused for more than `seconds` counts as finished."""

    def __init__(self, seconds: float):
        super().__init__()
        self.seconds = seconds

    def rank(self, c, now):
        if c.waits_since is None and now - c.used > self.seconds:
            return -1, c.ended
        return super().rank(c, now)


class Clairvoyant(Order):
    """The latest next use first (Belady)."""

    def rank(self, c, now):
        return -min([c.next_arrival, *(child.next_arrival for child in c.children)])


ORDERS: dict[str, Order] = {
    "oldest": Order(),
    "lru": Waiting(),
    "lfu": Lfu(),
    "slru": Slru(),
    "mru": Mru(),
    "reuse": Reuse(),
    "told": Told(),
    "planned": Planned(),
    "ttl-60": Expiring(60.0),
    "clairvoyant": Clairvoyant(),
}

# ---- admission: selects the next prompt from the waiting prompts, which are in order of arrival


def fcfs(waiting: list[Turn], computed: int) -> Turn:
    """First come, first served."""
    return waiting[0]


def lpm(waiting: list[Turn], computed: int) -> Turn:
    """SGLang's `lpm`: longest cached prefix first."""
    return max(waiting, key=lambda turn: turn.cached())


def hrrn(waiting: list[Turn], computed: int) -> Turn:
    """SGLang's `hrrn`: largest ratio first, of tokens computed for other prompts during the wait to uncached tokens of
    the prompt."""
    return max(waiting, key=lambda turn: (computed - turn.computed_before) / max(1, turn.uncached()))


def shortest(max_overtaken: int) -> Callable[[list[Turn], int], Turn]:
    """Fewest uncached tokens first, unless `max_overtaken` later prompts have overtaken the first one."""

    def pick(waiting: list[Turn], computed: int) -> Turn:
        if waiting[0].overtaken >= max_overtaken:
            return waiting[0]
        return min(waiting, key=lambda turn: turn.uncached())

    return pick


QUEUES: dict[str, Callable[[list[Turn], int], Turn]] = {
    "fcfs": fcfs,
    "lpm": lpm,
    "hrrn": hrrn,
    "shortest-256": shortest(256),
}
