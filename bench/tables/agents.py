"""Tables of agents at servers."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

from bench.e2e import arms
from bench.e2e.agent_targets import meets_targets
from bench.e2e.plot import points

from .text import CARDS, lines, pictures, sha, titled, worded

REPLAYED = {
    "agent_replay": "Recorded coding agents",
    "agent_replay_limit": "Recorded coding agents with limited running requests",
    "agent_replay_options": "Recorded coding agents with more options",
    "agent_replay_host": "Recorded coding agents with more host memory",
    "agent_replay_bfcl": "Agents in BFCL's dialogues",
}
LEGEND = """Agents run in a closed loop: an agent sends its next step when it has its answer and a pause is over. Each
row is one server with one number of agents. All servers have the same KV memory. The weights are random.

* *Servers.* `k4v4` with host memory is a server with `--kvc-host-memory`, and `hicache` is SGLang's hierarchical cache
  with the same host memory. A server with disk also has `--kvc-disk`. More options follow a plus sign, named as in
  `bench/agents/options.py`: `share-0.5` is `--kvc-running-share 0.5`, and `done` and `steps` are hints of the clients.
  Before 26285e4 running requests had no limit by default (a share of 1).
* *Within targets* says whether the 90th percentiles are at most 2 s to the first token and 25 ms per output token. The
  first table of a workload has the most agents before the first point that misses one.
* *Cache hits* is the share of prompt tokens that come from the prefix cache. *Again* is the share that is computed a
  second time. An infinite cache never evicts. Its share covers the tokens of all sessions, while a point covers some
  sessions.
* *Sessions/h* counts sessions that end in the measured window. An agent's first session counts from the step at which
  the agent starts, so long sessions are rare. *Session* has the seconds of these sessions and the share of them that
  is spent in pauses.
* *Host* and *disk* have GB/s to / from the tier. `hicache` reports its bytes only with `--enable-metrics`.
* Each point ran once (n = 1). A mark shows a point of another run, which the line below the table names."""


def agents(board: dict[str, dict], results: Path) -> tuple[list[str], set[str]]:
    """Tables of hit rates and step times over the number of agents, for each workload and GPU model."""
    out, used = [], {n for n in board if n.startswith("agents.") and ".curve." in n}
    for bench, title in REPLAYED.items():
        files = {name: results / "e2e" / f"{bench}_{card}.json" for card, name in CARDS.items()}
        records = {name: json.loads(path.read_text()) for name, path in files.items() if path.exists()}
        if not records:
            continue
        out += titled(title, [*_most(records), *pictures(results, bench, title)], 3)
        for name, record in records.items():
            out += _replayed(record, name)
    out = [LEGEND, "", *out] if out else []
    for card, name in CARDS.items():
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
            f"{sessions['tokens_longest'] / 1000:.0f}K. {100 * shares['results']:.0f}% of these tokens are outputs of "
            f"BFCL's functions and {100 * shares['filler']:.0f}% are filler. The weights are random. Pauses average "
            f"{sessions['pause']:g} s, and each point covers {sessions['seconds']:g} s after the ramp-up "
            f"({sha(record['commit'])}, n = 1)."
        )
        out += [text, "", *lines(head, rows), *pictures(results, "agents", "Agents in equal KV memory")]
    return titled("Agents", out), used


def _most(records: dict[str, dict]) -> list[str]:
    """Table of the most agents of each server within the targets. `records`: GPU model -> result file."""
    most = {card: record["numbers"]["most_agents"] for card, record in records.items()}
    curves = {card: points(record["numbers"], "a") for card, record in records.items()}

    def cell(card: str, server: str) -> str:
        """The most agents; below the first point if that one misses a target, and a bound if no point misses one."""
        if server not in most[card]:
            return ""
        measured = {n: rows[server] for n, rows in curves[card].items() if server in rows}
        bound = "at least " if all(meets_targets(row) for row in measured.values()) else ""
        return f"{bound}{most[card][server]}" if most[card][server] else f"fewer than {min(measured)}"

    servers = dict.fromkeys(server for curve in curves.values() for rows in curve.values() for server in rows)
    rows = [[_named(server), *(cell(card, server) for card in records)] for server in servers]
    return lines(["most agents within targets", *records], rows)


def _replayed(record: dict, card_name: str) -> list[str]:
    """Table of the points of one workload on one GPU model."""
    numbers, curve = record["numbers"], points(record["numbers"], "a")
    settings, servers = numbers["settings"], dict.fromkeys(s for rows in curve.values() for s in rows)
    sources = {row["source"] for rows in curve.values() for row in rows.values() if "source" in row}
    marks = {source: "\\*" * (i + 1) for i, source in enumerate(sorted(sources))}
    if settings.get("workload") == "bfcl":
        workload = (
            f"A session has {settings['join']} of BFCL's dialogues with real function results. An answer has "
            f"{settings['think']} tokens in addition to its call. Texts have {100 * settings['length_scale']:g}% of "
            f"their original length. A function takes {settings['tool_seconds'] * settings['time_scale']:g} s on "
            f"average."
        )
    else:
        workload = (
            f"Sessions have {100 * settings['length_scale']:g}% of the recorded lengths and "
            f"{100 * settings['time_scale']:g}% of the recorded pauses."
        )
    text = (
        f"One {card_name} has KV memory for {settings['tokens']:,} bf16 tokens and {settings['host_gb']} GB of host "
        f"memory. {workload} An infinite cache finds {100 * settings['endless']:.0f}% of the tokens. Each point covers "
        f"{settings['seconds']:g} s after the ramp-up."
    )
    rows = [_point(server, n, curve[n][server], marks)
            for server, n in itertools.product(servers, curve) if server in curve[n]]  # fmt: skip
    origins = [f"Measured at {sha(record['commit'])}", *(f"{mark}: {_origin(s)}" for s, mark in marks.items())]
    return [text, "", *lines(*_filled(HEAD, rows)), f"<sub>{'. '.join(origins)}.</sub>", ""]


HEAD = ["server", "agents", "within targets", "cache hits", "TTFT p50 / p90 / p99, s", "TPOT p90 / p99, ms", "again",
        "answers/h", "sessions/h", "session p50 / p90, s; paused", "host, GB/s", "disk, GB/s"]  # fmt: skip


def _filled(head: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """Table without its empty columns."""
    kept = [i for i in range(len(head)) if any(row[i] for row in rows)]
    return [head[i] for i in kept], [[row[i] for i in kept] for row in rows]


def _point(server: str, agents: int, row: dict, marks: dict[str, str]) -> list[str]:
    """Row of a point. `marks`: source of points from other runs -> its mark."""
    again = row.get("computed_again")
    return [
        _named(server),
        f"{agents} {marks.get(row.get('source'), '')}".strip(),
        "yes" if meets_targets(row) else "no",
        "" if row["from_cache"] is None else f"{100 * row['from_cache']:.0f}%",
        " / ".join(_seconds(row[f"first_token_s_{q}"]) for q in ("p50", "p90", "p99")),
        " / ".join(f"{1000 * row[f'output_token_s_{q}']:.0f}" for q in ("p90", "p99")),
        "" if again is None else f"{100 * again:.1f}%",
        f"{row['answers_h']:.0f}",
        f"{row['sessions_h']:.0f}",
        _job(row),
        _rates(row, "host_saved_bytes", "host_loaded_bytes"),
        _rates(row, "disk_written_bytes", "disk_read_bytes"),
    ]


def _named(server: str) -> str:
    """Name of a server in words, and its added options."""
    base, _, added = server.partition("+")
    return worded(base) + (f" + `{added}`" if added else "")


def _seconds(s: float) -> str:
    return f"{s:{'.0f' if s >= 100 else '.2g'}}"


def _origin(source: str) -> str:
    """Commit and options of a point of another run, as its source names them."""
    commit = re.search(r"\bat ([0-9a-f]{7})", source)
    options = re.search(r"\bwith(?:out)? --\S+(?: \d+)?", source)
    printed = "printed figures without a result file" if source.startswith("printed") else ""
    parts = [f"another run at {sha(commit[1])}" if commit else source, options[0] if options else "", printed]
    return ", ".join(part for part in parts if part)


def _job(row: dict) -> str:
    """Times of ended sessions; empty for older rows and if none ended."""
    if "job_s_p50" not in row:
        return ""
    return f"{row['job_s_p50']:.0f} / {row['job_s_p90']:.0f}; {100 * row['job_share_paused']:.0f}%"


def _rates(row: dict, out: str, back: str) -> str:
    """GB/s by which two counters rise; empty if the server has none or they stay zero."""
    tiers, seconds = row.get("tiers", {}), row.get("tiers_s") or row.get("ramp_s", 0) + row.get("measured_s", 0)
    moved = [tiers[name][1] - tiers[name][0] for name in (out, back) if name in tiers]
    return " / ".join(f"{m / seconds / 1e9:.1f}" for m in moved) if any(moved) else ""


def _server(server: str, curve: dict[int, dict[str, dict]]) -> str:
    row = next(rows[server] for rows in curve.values() if server in rows)
    return server.replace("kvc_", "kvc, ") if server.startswith("kvc") else arms.describe(row["options"])


def _step(row: dict | None) -> str:
    if row is None:
        return ""
    times = " / ".join(f"{row[f'step_s_{k}']:.3g}" for k in ("mean", "median", "p99"))
    return f"{100 * row['from_cache']:.0f}%; {row['steps_s']:.1f}; {times}"
