"""Simulation of coding agents whose cold blocks move to a lower format before any is evicted.

    python -m bench.agents.ladder TRACES.json.gz        # to bench/results/agents/ladder.json

The load and the machine are those of `bench.agents.simulate`, but blocks take the bytes of the page layout, with all
metadata. `floor` is a server with `--kvc-floor k2v2`, and `pages` one that also has the page size at which k2v2 blocks
are smallest. Formats like `7x` do not exist. A block demoted to `7x` takes a seventh of its size in bf16.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench import common
from sglang_kvc.cache.sizing import make_layout
from sglang_kvc.options.config import KvcConfig
from sglang_kvc.policies import make_policy
from sglang_kvc.policies.budget import compression, token_bytes

from . import simulate
from .cache import BLOCK, Cache
from .demotion import DemotingCache
from .orders import ORDERS, QUEUES
from .simulate import Machine, Simulation
from .traces import Session

LAYERS, HEADS, HEAD_DIM = 32, 8, 128
PAGE_BYTES = 5120  # 64 tokens of k2v2, without slack
RATIOS = (7.0, 12.0)


@dataclass(frozen=True)
class Curve:
    """`ratio`, `token_bytes`: of new blocks. `low_ratio`: of demoted ones; None: nothing is demoted."""

    ratio: float
    token_bytes: float
    low_ratio: float | None = None
    order: str = "lru"
    memory: float = Machine.memory

    def cache(self) -> Cache:
        machine, order = Machine(memory=self.memory, token_bytes=self.token_bytes), ORDERS[self.order]
        if self.low_ratio is None:
            return Cache(machine.blocks(self.memory), 0, order)
        high = BLOCK * self.token_bytes
        low = high * self.ratio / self.low_ratio
        return DemotingCache(machine.blocks(self.memory), 0, order, high=round(high), low=round(low))


def served(floor: str | None = None, page_bytes: int | None = None) -> Curve:
    """A k4v4 server with this floor."""
    config = KvcConfig(block_size=BLOCK, high="k4v4", floor=floor, page_bytes=page_bytes)
    policy = make_policy(config)
    layout = make_layout(config, policy, layers=LAYERS, heads=HEADS, head_dim=HEAD_DIM)
    pages = [block_format.pages for block_format in policy.block_formats(layout)]
    low = compression(layout, pages[policy.ladder[-1]]) if floor else None
    return Curve(compression(layout, pages[1]), token_bytes(layout, pages[1]), low)


def curves() -> dict[str, Curve]:
    plain = served()
    return {
        "k4v4": plain,
        "clairvoyant": replace(plain, order="clairvoyant"),
        "floor": served("k2v2"),
        "pages": served("k2v2", PAGE_BYTES),
        **{f"{ratio:g}x": replace(plain, low_ratio=ratio) for ratio in RATIOS},
        "endless": replace(plain, memory=1e15),
    }


def row(sessions: Sequence[Session], curve: Curve, queue: str, agents: int, args: Namespace) -> dict[str, float]:
    runs = []
    for seed in range(args.seeds):
        cache = curve.cache()
        simulation = Simulation(sessions, Machine(), cache.order, QUEUES[queue], agents, seed, cache)
        runs.append(simulation.run(1800, args.hours * 3600))
    demoted = sum(t.demoted for t in runs) / sum(t.prompt for t in runs)
    return simulate.row(runs, args.hours * 3600) | {"from_demoted": demoted}


def main() -> None:
    p = simulate.parser(__doc__)
    p.add_argument("--queues", default="fcfs,hrrn", help=f"admission orders, separated by commas: {', '.join(QUEUES)}")
    args = p.parse_args()
    sessions, settings = simulate.load(args)
    numbers, formats = {}, {}
    for name, curve in curves().items():
        formats[name] = {"ratio": curve.ratio, "token_bytes": curve.token_bytes, "low_ratio": curve.low_ratio}
        for queue in args.queues.split(","):
            for agents in map(int, args.agents.split(",")):
                numbers[f"{name}.{queue}.a{agents}"] = row(sessions, curve, queue, agents, args)
    print(simulate.table(numbers))
    if not args.no_write:
        common.write_result("agents/ladder", {"settings": settings, "formats": formats} | numbers)


if __name__ == "__main__":
    main()
