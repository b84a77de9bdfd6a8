"""Bytes of the memory sectors that decode attention fetches, compared with stored bytes. Needs no GPU.

    python -m bench.kernels.sectors

A GPU fetches full sectors of 32 bytes. Keys are stored token by token, so a partly filled page costs only its tokens. A
value row holds one feature pair of all tokens of a page, so a partly filled page may be fetched in full. The time of a
ragged format depends on the fetched bytes; `of_copy` of the other scripts counts stored bytes.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from bench.common import write_result

from .common import Workload, table
from .decode import workloads

SECTOR, RUN = 32, 16  # bytes; consecutive tokens whose values and metadata the kernel copies or skips together


def sector_bytes(pieces: list[tuple[int, int]]) -> int:
    """Bytes of the sectors of one page that overlap the pieces (offset, bytes)."""
    return SECTOR * len({s for at, n in pieces if n for s in range(at // SECTOR, (at + n - 1) // SECTOR + 1)})


def fetched_bytes(w: Workload, side: int, count: int, *, key_rows: bool = True) -> int:
    """Fetched bytes for `count` tokens of one block, head and tier. `key_rows`: keys are skipped token by token, not in
    runs."""
    layout = w.layout()
    page = layout.page(w.formats[side])
    total = 0
    for first in range(0, count, page.tokens):
        tokens = min(page.tokens, count - first)
        run = min(-(-tokens // RUN) * RUN, page.tokens)
        pieces = [(page.offset("key_codes"), (tokens if key_rows else run) * page.key_row_bytes)]
        pieces += [(page.offset("value_codes") + r * page.tokens, run) for r in range(page.value_row_bytes)]
        meta = page.offset("value_meta")
        pieces += [(meta + 2 * r * page.tokens, 2 * run) for r in range(2 * page.value_groups)]
        total += sector_bytes(pieces)
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
            for count, n in zip(*torch.unique(counts[:, 0, :, side], return_counts=True)):
                total += int(n) * fetched_bytes(w, side, int(count), key_rows=key_rows)
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
