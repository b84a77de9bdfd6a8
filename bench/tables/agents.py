"""Tables of agents at servers."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from bench.e2e import arms
from bench.e2e.plot import points

from .text import CARDS, lines, titled


def agents(board: dict[str, dict], results: Path) -> tuple[list[str], set[str]]:
    """Tables of hit rates and step times over the number of agents, for each GPU model."""
    out, used = [], {n for n in board if n.startswith("agents.") and ".curve." in n}
    for card, name in CARDS.items():
        for bench in ("agent_replay", "agent_replay_bfcl"):
            out += _replayed(results / "e2e" / f"{bench}_{card}.json", name)
        path = results / "e2e" / f"agents_{card}.json"
        if not path.exists():
            continue
        record = json.loads(path.read_text())
        curve, sessions = points(record["numbers"], "a"), record["numbers"]["sessions"]
        servers = dict.fromkeys(server for rows in curve.values() for server in rows)
        rows = [[_server(server, curve), *(_step(rows.get(server)) for rows in curve.values())] for server in servers]
        shares, head = sessions["shares"], ["server", *(f"{n} agents" for n in curve)]
        text = (
            f"Each cell gives the prefix-cache hit rate by tokens, steps per second, and the mean / median / p99 "
            f"seconds per step on one {name}. Histories average {sessions['tokens_mean'] / 1000:.1f}K tokens and reach "
            f"{sessions['tokens_longest'] / 1000:.0f}K. {100 * shares['results']:.0f} % of these tokens are outputs of "
            f"BFCL's functions and {100 * shares['filler']:.0f} % are filler. The weights are random. Pauses average "
            f"{sessions['pause']:g} s, and each point covers {sessions['seconds']:g} s after the ramp-up "
            f"({record['commit'][:7]}, n = 1)."
        )
        out += [text, "", *lines(head, rows)]
    return titled("Agents", out), used


def _replayed(path: Path, card_name: str) -> list[str]:
    """Table of recorded coding agents, or of agents in BFCL's dialogues, for one GPU model."""
    if not path.exists():
        return []
    record = json.loads(path.read_text())
    numbers, curve = record["numbers"], points(record["numbers"], "a")
    settings, servers = numbers["settings"], dict.fromkeys(s for rows in curve.values() for s in rows)

    def most(server: str) -> str:
        """The most agents; below the first point if that one misses a target."""
        return str(numbers["most_agents"][server] or f"< {min(n for n, rows in curve.items() if server in rows)}")

    sources = {row["source"] for rows in curve.values() for row in rows.values() if "source" in row}
    marks = {source: "\\*" * (i + 1) for i, source in enumerate(sorted(sources))}
    rows = [[s.replace("_", " "), *(_turn(rows.get(s), marks) for rows in curve.values()), most(s)] for s in servers]
    if settings.get("workload") == "bfcl":
        workload = "Agents in BFCL's dialogues with real function results"
        lengths = (
            f"Dialogues per session: {settings['join']}. An answer has {settings['think']} tokens in addition to its "
            f"call. Texts have {100 * settings['length_scale']:g} % of their original length. A function takes "
            f"{settings['tool_seconds'] * settings['time_scale']:g} s on average."
        )
    else:
        workload = "Recorded coding agents"
        lengths = f"Lengths are {settings['length_scale']:g} of the recorded ones, pauses {settings['time_scale']:g}."
    text = (
        f"{workload} in a closed loop on one {card_name}. Each cell gives the prefix-cache hit rate by "
        f"tokens, the p50 / p90 time to the first token in seconds, and the p90 time per output token in milliseconds. "
        f"The last column has the most agents within 2 s and 25 ms. Each server has the KV memory of "
        f"{settings['tokens']:,} bf16 tokens; `kvc` is `k4v4`, and `kvc tiers` (with --kvc-host-memory) and "
        f"SGLang's hierarchical cache (`hicache`) have {settings['host_gb']} GB of host memory. {lengths} "
        f"An endless cache, which never evicts, finds {100 * settings['endless']:.0f} % of the tokens of all sessions; "
        f"a point covers some of them. The weights are random. "
        f"Each point covers {settings['seconds']:g} s after the ramp-up "
        f"({record['commit'][:7]}, n = 1)."
    )
    text += "".join(f" {mark}: {source}." for source, mark in marks.items())
    out = [text, "", *lines(["server", *(f"{n} agents" for n in curve), "most"], rows)]
    return [*out, "", *_details(curve, marks)]


def _details(curve: dict[int, dict[str, dict]], marks: dict[str, str]) -> list[str]:
    """Table of the other figures of each point of `_replayed`."""
    servers = dict.fromkeys(server for rows in curve.values() for server in rows)
    rows = []
    for server, (n, points_of_n) in itertools.product(servers, curve.items()):
        if (row := points_of_n.get(server)) is None:
            continue
        again = row.get("computed_again")
        rows.append([
            f"{server.replace('_', ' ')}, {n} agents {marks.get(row.get('source'), '')}".strip(),
            f"{row['first_token_s_p99']:{'.0f' if row['first_token_s_p99'] >= 100 else '.2g'}} s",
            f"{1000 * row['output_token_s_p99']:.0f} ms",
            "" if again is None else f"{100 * again:.1f} %",
            f"{row['answers_h']:.0f}",
            f"{row['sessions_h']:.0f}",
            _job(row),
            _rates(row, "host_saved_bytes", "host_loaded_bytes"),
            _rates(row, "disk_written_bytes", "disk_read_bytes"),
        ])  # fmt: skip
    text = (
        "Other figures of the same points: 99th percentiles, prompt tokens that are computed a second time, answers "
        "and ended sessions per hour, the p50 / p90 seconds of these sessions and the share of them spent in pauses, "
        "and GB/s to / from host memory and disk. An agent's first session counts from the step at which the agent "
        "starts, and sessions that do not end in the window do not count, so long ones are rare. GB/s also cover the "
        "ramp-up if the file has no `tiers_s`. The hierarchical cache reports its bytes with `--enable-metrics`, which "
        "older rows lack."
    )
    rates = ["again", "answers/h", "sessions/h", "session", "host", "disk"]
    head = ["point", "first token, p99", "output token, p99", *rates]
    return [text, "", *lines(head, rows)]


def _job(row: dict) -> str:
    """Times of ended sessions; empty for older rows and if none ended."""
    if "job_s_p50" not in row:
        return ""
    return f"{row['job_s_p50']:.0f} / {row['job_s_p90']:.0f} s; {100 * row['job_share_paused']:.0f} %"


def _rates(row: dict, out: str, back: str) -> str:
    """GB/s by which two counters rise; empty if the server has none or they stay zero."""
    tiers, seconds = row.get("tiers", {}), row.get("tiers_s") or row.get("ramp_s", 0) + row.get("measured_s", 0)
    moved = [tiers[name][1] - tiers[name][0] for name in (out, back) if name in tiers]
    return " / ".join(f"{m / seconds / 1e9:.1f}" for m in moved) if any(moved) else ""


def _turn(row: dict | None, marks: dict[str, str]) -> str:
    """Cell of a point. `marks`: source of points from other runs -> its mark."""
    if row is None:
        return ""
    first = " / ".join(f"{row[f'first_token_s_{q}']:.2g}" for q in ("p50", "p90"))
    hit = "" if row["from_cache"] is None else f"{100 * row['from_cache']:.0f} %; "
    mark = f" {marks[row['source']]}" if "source" in row else ""
    return f"{hit}{first} s; {1000 * row['output_token_s_p90']:.0f} ms{mark}"


def _server(server: str, curve: dict[int, dict[str, dict]]) -> str:
    row = next(rows[server] for rows in curve.values() if server in rows)
    return server.replace("kvc_", "kvc, ") if server.startswith("kvc") else arms.describe(row["options"])


def _step(row: dict | None) -> str:
    if row is None:
        return ""
    times = " / ".join(f"{row[f'step_s_{k}']:.3g}" for k in ("mean", "median", "p99"))
    return f"{100 * row['from_cache']:.0f} %; {row['steps_s']:.1f}; {times}"
