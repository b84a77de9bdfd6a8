"""Host time of the host and disk tiers in a server that has neither (`--kvc-host-memory 0`, the default).

    python -m bench.serve.off_overhead [--requests 256] [--tokens 4096] [--quick]

Decode steps and prefills run in SGLang's scheduler without a model, as in `host_step`, under Python's profiler.
`agents.off_overhead` is the profiled time of a turn over the same time without the functions of the tiers' files.
The profiler's own cost counts in full for these functions. A few tests of `runtime.host_tier is None` in other files do
not count.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
from pathlib import Path
from unittest import mock

import torch
from triton.runtime.jit import JITFunction

from bench.common import Score, write_result
from bench.serve import host_step
from kvc_kernels.store import PageStore

TIER_FILES = {
    "host_memory.py", "host_tier.py", "disk_store.py", "disk_tier.py", "transfers.py", "tree_host.py", "tree_disk.py",
    "tree_prefetch.py", "tree_metrics.py", "hit_sources.py", "backend_store.py",
}  # fmt: skip


def profiled(requests: int, tokens: int, steps: int) -> dict[str, float]:
    """Seconds and calls of all turns of the scheduler, and of the tiers' functions in them."""
    profile, turn = cProfile.Profile(), host_step.Server.turn
    with mock.patch.object(host_step.Server, "turn", lambda server: profile.runcall(turn, server)):
        host_step.measure(True, requests, tokens, steps)
    total_s = tier_s = 0.0
    tier_calls = 0
    for (path, _, _), (_, calls, own_s, _, _) in pstats.Stats(profile).stats.items():
        total_s += own_s
        if Path(path).name in TIER_FILES and "sglang_kvc" in path:
            tier_s, tier_calls = tier_s + own_s, tier_calls + calls
    return {"total_s": total_s, "tier_s": tier_s, "tier_calls": tier_calls}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--quick", action="store_true", help="few short requests, no result file")
    args = parser.parse_args()
    if args.quick:
        args.requests, args.tokens, args.steps = 8, 3 * host_step.P, host_step.P
    torch.set_num_threads(1)
    no_launch = mock.patch.object(JITFunction, "run", lambda *args, **options: None)
    with no_launch, mock.patch.object(PageStore, "use_kernels", True):
        times = profiled(args.requests, args.tokens, args.steps)
    ratio = times["total_s"] / (times["total_s"] - times["tier_s"])
    print(f"{ratio:.6f} of the host time without the tiers' functions, {times['tier_calls']} calls of these")
    if not args.quick:
        unit = f"x host time of a turn, {args.requests} requests of {args.tokens} tokens"
        score = Score(ratio, unit, "the same turns without the tiers' functions", n=args.steps)
        write_result("serve/off_overhead", times | vars(args), scores={"agents.off_overhead": score})


if __name__ == "__main__":
    main()
