"""The most agents at the latency targets, and scores that compare servers by them.

A server whose curve misses no target has no score, because its most agents are unknown. If `kvc_tiers` misses none, the
unit says "at least".
"""

from __future__ import annotations

import itertools
from typing import Any

from bench.common import Score

FIRST_TOKEN_S, OUTPUT_TOKEN_S = 2.0, 0.025  # targets of the 90th percentiles


def holds(row: dict[str, Any]) -> bool:
    return row["first_token_s_p90"] <= FIRST_TOKEN_S and row["output_token_s_p90"] <= OUTPUT_TOKEN_S


def most_agents(numbers: dict[str, dict]) -> dict[str, int]:
    """Server -> the most agents at the targets, below the first number that misses them; 0 if none holds them."""
    return {
        server: max([0, *(n for n, _ in itertools.takewhile(lambda point: holds(point[1]), rows))])
        for server, rows in points(numbers).items()
    }


def scores(numbers: dict[str, dict], endless: float, prefix: str = "agents") -> dict[str, Score]:
    """The most agents of `kvc_tiers` over those of each other server; its hit rate at twice the most agents of `kvc`
    over `endless`, that of a cache that forgets nothing."""
    found, most, out = points(numbers), most_agents(numbers), {}
    unit = f"x agents, p90 within {FIRST_TOKEN_S:g} s to the first token and {1000 * OUTPUT_TOKEN_S:g} ms per token"
    missed = {server for server, rows in found.items() if not all(holds(row) for _, row in rows)}
    for name, other in (("vs_bf16", "stock_bf16"), ("vs_fp8", "stock_fp8"), ("vs_fp8_hicache", "stock_fp8_hicache"),
                        ("tiers_vs_static", "kvc")):  # fmt: skip
        if most.get("kvc_tiers") and most.get(other) and other in missed:
            said = unit if "kvc_tiers" in missed else f"{unit}, at least"
            out[f"{prefix}.{name}"] = Score(most["kvc_tiers"] / most[other], said, f"{other}, {most[other]} agents")
    twice = dict(found.get("kvc_tiers", [])).get(2 * most.get("kvc", 0))
    if twice and twice["from_cache"] is not None and "kvc" in missed:
        share = twice["from_cache"] / endless
        baseline = f"kvc at {most['kvc']} agents"
        out[f"{prefix}.hit_of_endless_2x"] = Score(share, "of an endless cache's hit rate", baseline)
    return out


def points(numbers: dict[str, dict]) -> dict[str, list[tuple[int, dict]]]:
    """Server -> (agents, row), by agents."""
    found: dict[str, list[tuple[int, dict]]] = {}
    for name, row in numbers.items():
        server, _, point = name.rpartition(".a")
        if server and point.isdigit():
            found.setdefault(server, []).append((int(point), row))
    return {server: sorted(rows, key=lambda point: point[0]) for server, rows in found.items()}
