"""Maximum number of agents within the latency targets, and scores that compare servers by it.

If a server's curve never misses a target, its maximum is unknown, and it gets no score as a baseline. If that server is
`kvc_tiers`, the unit says "at least". Servers of different runs are not compared.
"""

from __future__ import annotations

import itertools
from typing import Any

from bench.common import Score

FIRST_TOKEN_S, OUTPUT_TOKEN_S = 2.0, 0.025  # targets for the 90th percentiles
KNEE = 0.9  # share of an endless cache's hit rate below which a cache thrashes


def meets_targets(row: dict[str, Any]) -> bool:
    return row["first_token_s_p90"] <= FIRST_TOKEN_S and row["output_token_s_p90"] <= OUTPUT_TOKEN_S


def most_agents(numbers: dict[str, dict]) -> dict[str, int]:
    """Server -> largest number of agents before the first point that misses a target; 0 if the first point does."""

    def largest(rows: list[tuple[int, dict]]) -> int:
        within = itertools.takewhile(lambda point: meets_targets(point[1]), rows)
        return max((agents for agents, _ in within), default=0)

    return {server: largest(rows) for server, rows in points(numbers).items()}


def scores(numbers: dict[str, dict], endless: float, prefix: str = "agents") -> dict[str, Score]:
    """Ratios of the maximum number of agents of `kvc_tiers` to that of each other server, the hit rate of `kvc_tiers`
    at twice the knee of `kvc` relative to `endless`, the hit rate of a cache that never evicts, and the hit rate of
    each point that this run measured (`curve`)."""
    rows_by_server, max_agents, result = points(numbers), most_agents(numbers), {}
    unit = f"x agents, p90 within {FIRST_TOKEN_S:g} s to the first token and {1000 * OUTPUT_TOKEN_S:g} ms per token"
    missed = {server for server, rows in rows_by_server.items() if not all(meets_targets(row) for _, row in rows)}
    ours = max_agents.get("kvc_tiers")
    for name, other in (("vs_bf16", "stock_bf16"), ("vs_fp8", "stock_fp8"), ("vs_fp8_hicache", "stock_fp8_hicache"),
                        ("tiers_vs_static", "kvc")):  # fmt: skip
        agents = max_agents.get(other)
        same_run = ours and agents and not _source(rows_by_server["kvc_tiers"], ours)
        if same_run and other in missed and not _source(rows_by_server[other], agents):
            bound = "" if "kvc_tiers" in missed else ", at least"
            result[f"{prefix}.{name}"] = Score(ours / agents, f"{unit}{bound}", f"{other}, {agents} agents")
    agents = knee(rows_by_server.get("kvc", []), endless)
    tiers = rows_by_server.get("kvc_tiers", [])
    row = dict(tiers).get(2 * (agents or 0))
    if row and row["from_cache"] is not None:
        share = row["from_cache"] / endless
        source, known = _source(tiers, 2 * agents), _source(rows_by_server["kvc"], agents)
        baseline = f"{2 * agents} agents{source}; the hit rate of kvc drops after {agents}{known}"
        result[f"{prefix}.hit_of_endless_2x"] = Score(share, "of an endless cache's hit rate", baseline)
    for server, rows in rows_by_server.items():
        for n, row in rows:
            if row.get("from_cache") is not None and "source" not in row:
                result[f"{prefix}.curve.{server}.{n}"] = Score(row["from_cache"], "of prompt tokens from the cache", "")
    return result


def _source(rows: list[tuple[int, dict]], agents: int) -> str:
    """Where the row of this number of agents is from, if it is from another run than the file's commit."""
    source = dict(rows)[agents].get("source")
    return f" ({source})" if source else ""


def knee(rows: list[tuple[int, dict]], endless: float) -> int | None:
    """Largest number of agents before the hit rate first drops below KNEE of `endless`; None if it does not drop, or is
    below from the start."""
    before = None
    for agents, row in rows:
        if row["from_cache"] is None:
            return None
        if row["from_cache"] < KNEE * endless:
            return before
        before = agents
    return None


def points(numbers: dict[str, dict]) -> dict[str, list[tuple[int, dict]]]:
    """Server -> [(agents, row)], sorted by agents."""
    rows_by_server: dict[str, list[tuple[int, dict]]] = {}
    for name, row in numbers.items():
        server, _, point = name.rpartition(".a")
        if server and point.isdigit():
            rows_by_server.setdefault(server, []).append((int(point), row))
    return {server: sorted(rows, key=lambda point: point[0]) for server, rows in rows_by_server.items()}
