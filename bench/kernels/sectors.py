"""Bytes of the memory sectors that decode attention fetches, and stored bytes. Needs no GPU.

    python -m bench.kernels.sectors

A GPU fetches whole sectors of 32 bytes. Keys lie token by token, so a part-filled tile costs its tokens; a value row
holds one feature pair of all tokens of a page, so a page whose last run of 16 tokens is not begun may still be fetched
whole. The time of a ragged format depends on these bytes; `of_copy` of the other scripts counts the stored ones.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from bench.common import write_result

from .common import Workload, table
from .decode import workloads

SECTOR, RUN = 32, 16  # bytes; tokens that the kernel copies or leaves together, of values and metadata


def touched(pieces: list[tuple[int, int]]) -> int:
    """Bytes of the sectors that (offset, bytes) pieces of one page touch."""
    return SECTOR * len({s for at, n in pieces if n for s in range(at // SECTOR, (at + n - 1) // SECTOR + 1)})


def of_count(w: Workload, side: int, count: int, *, key_rows: bool = True) -> int:
    """Bytes for `count` tokens of one block, head and tier. `key_rows`: keys are skipped one by one, not in runs."""
    layout = w.layout()
    page = layout.page(w.formats[side])
    total = 0
    for first in range(0, count, page.tokens):
        tokens = min(page.tokens, count - first)
        run = min(-(-tokens // RUN) * RUN, page.tokens)
        rows = page.value_row_bytes * page.tokens // page.tokens
        pieces = [(page.offset("key_codes"), (tokens if key_rows else run) * page.key_row_bytes)]
        pieces += [(page.offset("value_codes") + r * page.tokens, run) for r in range(rows)]
        meta = page.offset("value_meta")
        pieces += [(meta + 2 * r * page.tokens, 2 * run) for r in range(2 * page.value_groups)]
        total += touched(pieces)
    return total


def measure(w: Workload) -> dict:
    """Stored and fetched MB of `w`: codes, metadata, headers and table of one layer."""
    blocks = w.batch * w.tokens // w.block_tokens
    counts = w.counts(blocks, torch.Generator().manual_seed(0))
    stored = w.stored_bytes(counts, 0)
    fixed = stored - sum(
        int(counts[:, 0, :, s].sum()) * (p.key_row_bytes + p.value_row_bytes + 4 * p.value_groups)
        for s, p in enumerate(w.layout().page(f) for f in w.formats)
    )
    out = {"stored_mb": stored / 1e6}
    for name, key_rows in (("fetched_mb", True), ("fetched_by_runs_mb", False)):
        total = fixed
        for side in range(len(w.formats)):
            values, often = torch.unique(counts[:, 0, :, side], return_counts=True)
            each = [of_count(w, side, int(v), key_rows=key_rows) for v in values]
            total += sum(e * int(n) for e, n in zip(each, often))
        out[name] = total / 1e6
    return out


def cases() -> dict[str, Workload]:
    out = workloads(128, 0)
    out["heads_50"] = replace(out["k4v4"], kept="heads:50:50")
    out["heads_10_90"] = replace(out["k4v4"], kept="heads:10:90")
    return out


def main() -> None:
    numbers = {name: measure(w) for name, w in cases().items()}
    rows = [dict(name=n, **r, share=r["fetched_mb"] / r["stored_mb"]) for n, r in numbers.items()]
    columns = {"stored_mb": ".0f", "fetched_mb": ".0f", "fetched_by_runs_mb": ".0f", "share": ".2f"}
    print(table(rows, {"name": "", **columns}))
    write_result("kernels/decode_sectors", numbers)


if __name__ == "__main__":
    main()
