"""`sglang-kvc inspect`: prints the cache statistics of a running server as a table, and draws the head map.

Needs only HTTP and the standard library, so it starts at once and runs on any machine.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_kvc.stats.head_map import draw
from sglang_kvc.stats.records import HeadMap, KvcStats, printable, times

TIMEOUT_S = 30


class InspectError(RuntimeError):
    """Statistics cannot be shown; the message says why and what to do."""


@dataclass(frozen=True)
class Report:
    """The answer of one scheduler (one per data-parallel rank)."""

    stats: KvcStats
    head_map: HeadMap | None


def fetch(url: str, api_key: str | None = None) -> list[dict[str, Any]]:
    """The `kvc` part of every scheduler's state, as the server sends it."""
    if "://" not in url:
        url = "http://" + url
    if api_key and not (api_key.isascii() and api_key.isprintable()):
        raise InspectError("the key has characters that no header may have; give another --api-key")
    try:
        request = urllib.request.Request(url.rstrip("/") + "/server_info")
        if api_key:
            request.add_header("Authorization", f"Bearer {api_key}")
        if not urllib.parse.urlsplit(url).hostname:
            raise http.client.InvalidURL
    except (http.client.InvalidURL, ValueError):
        raise InspectError(_no_address(url)) from None
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            info = json.load(answer)
    except urllib.error.HTTPError as e:
        hint = "give its key with --api-key" if e.code in (401, 403) else "is it an SGLang server?"
        raise InspectError(f"{url} answered {e.code} {printable(e.reason)}; {hint}") from None
    except http.client.InvalidURL:
        raise InspectError(_no_address(url)) from None
    except (urllib.error.URLError, OSError) as e:
        reason = getattr(e, "reason", e)
        raise InspectError(
            f"no server answers at {url} ({reason}); start one, or give its address with --url"
        ) from None
    except (ValueError, http.client.HTTPException):
        raise InspectError(
            f"{url} did not answer as an SGLang server does; give a server's address with --url"
        ) from None
    states = info.get("internal_states") if isinstance(info, dict) else None
    states = states if isinstance(states, list) else []
    states = [s["kvc"] for s in states if isinstance(s, dict) and isinstance(s.get("kvc"), dict)]
    if not states:
        raise InspectError(f"the server at {url} keeps its cache uncompressed; start it with --kv-backend kvc")
    return states


def _no_address(url: str) -> str:
    return f"{printable(url)} is not an address; give one like http://127.0.0.1:30000 with --url"


def parse(state: dict[str, Any], url: str) -> Report:
    """The `kvc` part of one scheduler's state, which came from `url`."""
    if "error" in state:
        raise InspectError(f"the server could not collect its statistics ({printable(state['error'])}); see its log")
    try:
        head_map = state.get("head_map")
        return Report(KvcStats.from_dict(state["stats"]), HeadMap.from_dict(head_map) if head_map else None)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:
        raise InspectError(
            f"{url} sent statistics that cannot be read ({type(e).__name__}); is it a server of this version?"
        ) from None


def run(url: str, *, api_key: str | None = None, as_json: bool = False, map_file: str | None = None) -> int:
    """Run the command. Several schedulers give one table each, and numbered maps."""
    states = fetch(url, api_key)
    if as_json:
        print(json.dumps(states, indent=2))
    reports = [parse(s, url) for s in states]
    for i, report in enumerate(reports):
        title = url if len(reports) == 1 else f"{url}, scheduler {i}"
        if not as_json:
            print(table(report, title))
        if map_file:
            name = Path(map_file)
            if i:
                name = name.with_stem(f"{name.stem}-{i}")
            _draw(report, name, title)
            if not as_json:
                print(f"\nhead map: {name}")
    return 0


def _draw(report: Report, name: Path, title: str) -> None:
    if report.head_map is None or not report.head_map.blocks:
        raise InspectError(
            "no block is packed yet, so there is no map to draw; send some requests of a few blocks first"
        )
    try:
        draw(report.head_map, name, title=title, caption=report.stats.config, rows=rows(report.stats))
    except (OSError, ValueError) as e:
        raise InspectError(str(e)) from None


def rows(s: KvcStats) -> list[tuple[str, str]]:
    """Label and value of every figure, in reading order."""
    out = [
        ("policy", s.config),
        ("scope", s.scope),
        ("compression", f"{times(s.ratio)} over all resident tokens"),
        ("compression, body", f"{times(s.ratio_body)} over packed blocks"),
        ("bytes per token", f"{_number(s.bytes_per_token)} of {s.bf16_token_bytes} uncompressed"),
        ("bytes per token, body", _number(s.bytes_per_token_body)),
        ("tokens resident", f"{s.tokens} ({s.packed_tokens} packed)"),
        ("memory", f"{_size(s.bytes)} in use, all metadata counted"),
        ("pages", f"{s.pages_free} of {s.pages_total} free, {s.page_bytes} bytes each"),
        *([("block ids", f"{s.block_ids_free} of {s.block_ids_total} free")] if s.block_ids_total else []),
        ("blocks", ", ".join(f"{n} {name}" for name, n in s.blocks_by_format.items()) or "none"),
    ]
    shares = s.tier_shares
    if shares:
        out.append(("tiers", ", ".join(f"{tier} {100 * share:.1f} %" for tier, share in shares.items())))
    if s.occupancy is not None:
        out.append(("occupancy", f"{100 * s.occupancy:.1f} % of the packed pages' token slots"))
    mean = f", {s.compaction_ms / s.compactions:.2f} ms each" if s.compactions else ""
    out.append(("compactions", f"{s.compactions} blocks in {s.compaction_ms:.0f} ms of host time{mean}"))
    out.append(("evicted", f"{s.evicted_blocks} blocks"))
    if s.recomputed_tokens:
        limit = f"; running requests may hold {s.running_share:.0%} of the memory" if s.running_share < 1 else ""
        out.append(("recomputed", f"{s.recomputed_tokens} prompt tokens that had been dropped{limit}"))
    if s.demoted_blocks:
        out.append(("demoted", f"{s.demoted_blocks} blocks moved to a lower format"))
    if s.host_bytes_total:
        used = f"{_size(s.host_bytes)} of {_size(s.host_bytes_total)} in use by {s.host_blocks} blocks"
        out.append(("host memory", used))
        moved = f"{_size(s.host_saved_bytes)} out, {_size(s.host_loaded_bytes)} back"
        out.append(("host traffic", f"{moved} in {s.transfer_ms:.0f} ms of host time"))
        if s.host_load_ms:
            out.append(("rate of loads", f"{s.host_arrived_bytes / s.host_load_ms / 1e6:.1f} GB/s"))
    if s.disk_bytes_total:
        out.append(("disk", f"{_size(s.disk_bytes)} of {_size(s.disk_bytes_total)}, {s.disk_blocks} blocks"))
    if s.disk_bytes_total or s.disk_written_bytes or s.disk_read_bytes:
        out.append(("disk traffic", f"{_size(s.disk_written_bytes)} written, {_size(s.disk_read_bytes)} read"))
        if s.disk_damaged:
            out.append(("damaged records", str(s.disk_damaged)))
    return out


def table(report: Report, title: str) -> str:
    lines = rows(report.stats)
    width = max(len(label) for label, _ in lines)
    return "\n".join([title, "-" * len(title), *(f"{label:<{width}}  {value}" for label, value in lines)])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _size(n: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "bytes" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.2f} GB"
