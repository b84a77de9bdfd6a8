"""Compression ratio of the cache, from the statistics of a running server.

    python -m bench.serve.ratio [--formats k4v4,leankv] [--lengths 1024,4096,7936] [--block 128]

For each format, a server gets prompts of real text, one length at a time. Its statistics are read while it generates
the answer. *Body* covers the packed blocks with page slack, scales, headers, tables and ring entries. *End to end* also
covers the uncompressed end of the sequence. Both are relative to bf16 K and V without any overhead.
"""

from __future__ import annotations

import argparse
import json
import threading

import requests

from bench import common, prompts

NAME = "serve/ratio"
FORMATS = ("bf16", "k8v8", "k8v4", "k4v4", "k4v2", "k2v2", "quota", "max", "leankv")
PACKED = FORMATS[1:6]  # formats whose occupancy is compared
LENGTHS = (1024, 4096, 7936)  # the last leaves room for an answer in the model's context of 8192
DECODED = 6  # generated tokens before the statistics are read; the prompt's blocks are packed in the first step


FIELDS = (
    "ratio", "ratio_body", "bytes_per_token", "bytes_per_token_body", "occupancy", "tier_shares", "tokens",
    "packed_tokens", "bytes", "packed_bytes", "bf16_token_bytes", "page_bytes", "config",
)  # fmt: skip


def in_flight(server: common.Server, prompt: list[int], level: str | None = None) -> dict:
    """Statistics of the server while it answers this prompt. `level`: the requested quality."""
    rid = f"ratio-{len(prompt)}"  # unique, so that an abort of an earlier request cannot hit it
    sampling = {"custom_params": {"kvc": level}} if level else {}
    payload = server.client.payload(prompt, 200, stream=True, rid=rid, sampling=sampling)
    stats: dict | None = None
    with requests.post(server.url + "/generate", json=payload, stream=True, timeout=3600) as response:
        for line in response.iter_lines(decode_unicode=True):
            if not line.startswith("data: {"):
                continue
            meta = json.loads(line[6:])["meta_info"]
            if stats is None and meta["completion_tokens"] >= DECODED:
                stats = server.client.stats()
                # Abort from another thread, because this one must read the rest of the stream.
                threading.Thread(target=server.client.post, args=("/abort_request", {"rid": rid})).start()
    assert stats, "the request ended before the statistics were read"
    return stats


def check(stats: dict, prompt_tokens: int) -> None:
    """Check that the statistics cover the bytes of all used pages and count only tokens that exist."""
    used = (stats["pages_total"] - stats["pages_free"]) * stats["page_bytes"]
    assert stats["bytes"] >= used, f"{stats['bytes']} bytes reported, but {used} are in use"
    assert prompt_tokens <= stats["tokens"] <= prompt_tokens + 200, stats["tokens"]


def measure(fmt: str, lengths: list[int], block: int, texts: dict[int, list[int]]) -> dict:
    rows = {}
    with common.Server(common.kvc(fmt, block=block, memory="1GB")) as server:
        for n in lengths:
            server.client.flush()
            stats = in_flight(server, texts[n])
            check(stats, n)
            server.client.flush()
            rows[str(n)] = {k: stats[k] for k in FIELDS}
            print(fmt, n, {k: rows[str(n)][k] for k in ("ratio", "ratio_body", "occupancy")}, flush=True)
        assert not server.errors(), server.errors()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--name", default=NAME, help="name of the result file")
    args = parser.parse_args()
    formats, lengths = args.formats.split(","), [int(n) for n in args.lengths.split(",")]
    tok = prompts.tokenizer(common.demo_model())
    texts = {n: prompts.cut(tok, prompts.prose(), n) for n in lengths}
    rows = {fmt: measure(fmt, lengths, args.block, texts) for fmt in formats}
    common.write_result(args.name, {"block": args.block, "formats": rows}, scores=scores(rows))


PLAIN = "bf16 keys and values alone"


def scores(rows: dict) -> dict[str, tuple[float, str]]:
    """Body ratio at the longest length, end-to-end ratio at 4K, and the lowest occupancy if all formats ran."""
    out = {}
    for fmt, by_length in rows.items():
        longest = by_length[max(by_length, key=int)]
        if longest["ratio_body"]:
            out[f"serve.ratio_body.{fmt}"] = (longest["ratio_body"], "x smaller", PLAIN)
        if "4096" in by_length:
            out[f"serve.ratio_4k.{fmt}"] = (by_length["4096"]["ratio"], "x smaller", PLAIN)
    occupancies = [r["occupancy"] for by_length in rows.values() for r in by_length.values() if r["occupancy"]]
    if set(rows) >= set(PACKED) and occupancies:
        out["serve.occupancy"] = (min(occupancies), "share of token slots, worst format")
    return out


if __name__ == "__main__":
    main()
