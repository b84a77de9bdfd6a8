"""What the simulator compares: orders of eviction, and orders in which waiting prompts are admitted."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cache import Chain
    from .simulate import Turn

INFINITE = float("inf")

# ---- eviction: the lowest rank first. All but `clairvoyant` look at the past alone.


class Order:
    """Least recently used first."""

    told = False  # whether clients say whose prompt it is, and which one is the last

    def rank(self, c: Chain, now: float) -> Any:
        return c.used


class Lfu(Order):
    """SGLang's `lfu`: the fewest uses first."""

    def rank(self, c, now):
        return c.hits, c.used


class Slru(Order):
    """SGLang's `slru`: what was used once first."""

    def rank(self, c, now):
        return c.hits >= 2, c.used


class Mru(Order):
    """SGLang's `mru`: the most recently used first."""

    def rank(self, c, now):
        return -c.used


class Waiting(Order):
    """SGLang's `lru`, which also counts a waiting prompt as a use: chains of waiting prompts go last, the one that came
    last first."""

    def rank(self, c, now):
        return (0, c.used) if c.waits_since is None else (1, -c.waits_since)


class Reuse(Order):
    """The least chance to come back first.

    A session's pauses are exponential, with a rate that has a gamma prior: after a silence of s its rate of return is
    proportional to 1 / (b + s), where b is `weight` times its typical pause. The order by that rate is the order of
    `ended - b`, which time does not change. Chains of waiting prompts go last.
    """

    def __init__(self, weight: float = 1.0):
        self.weight = weight

    def rank(self, c, now):
        if c.waits_since is not None:
            return 1, -c.waits_since
        if self.told and c.dead:
            return -1, c.ended
        return 0, c.ended - self.weight * c.pause


class Told(Reuse):
    """Like `Reuse`, where clients name the session of a prompt and say which one is its last."""

    told = True


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
    "clairvoyant": Clairvoyant(),
}

# ---- admission: the prompt that is served next, of those that wait in the order of their arrival


def fcfs(waiting: list[Turn], computed: int) -> Turn:
    """The first one."""
    return waiting[0]


def lpm(waiting: list[Turn], computed: int) -> Turn:
    """SGLang's `lpm`: the longest cached prefix."""
    return max(waiting, key=lambda turn: turn.cached())


def hrrn(waiting: list[Turn], computed: int) -> Turn:
    """SGLang's `hrrn`: the most tokens that were computed for others meanwhile, over its own tokens to compute."""
    return max(waiting, key=lambda turn: (computed - turn.computed_before) / max(1, turn.uncached()))


def shortest(most: int) -> Callable[[list[Turn], int], Turn]:
    """The fewest tokens to compute; but the first one when `most` later prompts have overtaken it."""

    def pick(waiting: list[Turn], computed: int) -> Turn:
        if waiting[0].overtaken >= most:
            return waiting[0]
        return min(waiting, key=lambda turn: turn.uncached())

    return pick


QUEUES: dict[str, Callable[[list[Turn], int], Turn]] = {
    "fcfs": fcfs,
    "lpm": lpm,
    "hrrn": hrrn,
    "shortest-256": shortest(256),
}
