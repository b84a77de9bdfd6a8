"""How unevenly a budget falls on layers, heads and positions: the tokens that each head of each layer keeps of each
block of a prompt that ends with a question.

    python -m bench.quality.spread [--model qwen-0.5b] [--contexts 4] [--length 2048]

Needs no server (see `bench.quality.answers`). Cell `block` packs the prompt under `kv-compress`, where heads and layers
compete within each block. The other cells pack it as a one-shot prompt, where blocks compete too. All cells store k4v4.
Blocks that stay uncompressed at the end of a prompt are not counted.

`kept` is the share of the tokens that stay. The counts of all blocks, layers and heads of a prompt have a variance:

* `layers`: the variance of the means of the layers, as a share of it.
* `heads`: the variance of the means of the heads of all layers around the mean of their layer, as a share of it.
* `positions`: the variance of the means of the blocks, as a share of it.

`chance` has the expected shares for counts in random order. `by_layer`, `by_head` and `by_block` have the smallest and
the largest kept share of a layer, of a head of a layer, and of a block. `ends` is the share of the kept tokens that lie
in the first and the last block. `floor` is the smallest share of a block that a head can keep, and `at_floor` the share
of the pairs of a block and a head that keep no more. Figures are means over prompts.
"""

from __future__ import annotations

import argparse
from unittest import mock

import torch

from bench import common, prompts
from bench.quality import fetch
from bench.quality.answers import Replay
from bench.quality.tasks import Maker
from kvc_kernels import ops
from sglang_kvc.cache.one_shot import Budget

PRUNED, WHOLE = "kv-compress+budget=8x+high=k4v4", "k4v4"
CELLS = {"block": None} | {f"one-shot-{r}x": Budget(ratio=r) for r in (8, 16, 64)}


def summary(counts: torch.Tensor, block_tokens: int, floor: int) -> dict:
    """Figures of one prompt, of which each head keeps `counts` `[blocks, L, H]` tokens; see the module docstring."""
    x = counts.double() / block_tokens
    blocks, layers, heads = x.shape
    by_layer, by_head, by_block = x.mean((0, 2)), x.mean(0), x.mean((1, 2))
    parts = {"layers": by_layer, "heads": by_head - by_layer[:, None], "positions": by_block}
    freedom = {"layers": layers - 1, "heads": layers * (heads - 1), "positions": blocks - 1}
    return {
        "kept": x.mean().item(),
        "variance": {name: (part.var(correction=0) / x.var(correction=0)).item() for name, part in parts.items()},
        "chance": {name: n / (x.numel() - 1) for name, n in freedom.items()},
        "by_layer": [v.item() for v in by_layer.aminmax()],
        "by_head": [v.item() for v in by_head.aminmax()],
        "by_block": [v.item() for v in by_block.aminmax()],
        "ends": ((by_block[0] + by_block[-1]) / by_block.sum()).item(),
        "floor": floor / block_tokens,
        "at_floor": (counts <= floor).double().mean().item(),
    }


def mean(values: list):
    """Mean of equal structures of numbers, number by number."""
    if isinstance(values[0], dict):
        return {key: mean([v[key] for v in values]) for key in values[0]}
    if isinstance(values[0], list):
        return [mean(list(column)) for column in zip(*values, strict=True)]
    return sum(values) / len(values)


def tokens_by_block(best: torch.Tensor, pages: torch.Tensor, page_tokens: int, blocks: int, p: int) -> torch.Tensor:
    """Tokens `[blocks, L, H]` of each block of `p` tokens among the first `pages[L, H]` pages of `best[L, H, n]`, a
    head's tokens by rank."""
    kept = torch.arange(best.shape[-1], device=best.device) < pages[..., None] * page_tokens
    counts = torch.zeros((*pages.shape, blocks), dtype=torch.int64, device=best.device)
    return counts.scatter_add_(-1, best.long() // p, kept.long()).movedim(-1, 0)


def packed(model, ids: torch.Tensor, block: int, budget: Budget | None) -> dict:
    """`summary` of the prompt `ids` `[n]`, packed by block or with a budget for the whole prompt."""
    replay = Replay(model, WHOLE if budget else PRUNED, block, ids[None])
    runtime = replay.runtime
    store = runtime.store
    page_tokens = runtime.layout.page(store.block_formats[1].high).tokens
    if budget is None:
        replay.prefill(0, len(ids))
        runtime.flush()
        seq, floor = replay.seqs[0], runtime.policy.floor_pages(runtime.layout) * page_tokens
        return summary(store.counts[seq.blocks[: seq.window_start]].sum(-1), block, floor)
    seq = runtime.new_one_shot(budget, len(ids))
    replay.seqs, seq.one_shot.row = [seq], 0
    runtime.page_ops.gaps = ops.RowGaps(1, store.device)
    # Packed blocks hold tokens of many positions and do not name them.
    with mock.patch.object(ops, "pack_kept", wraps=ops.pack_kept) as pack:
        replay.prefill(0, len(ids))
        runtime.flush()
    _, blocks, kept_blocks, _, best, pages = pack.call_args.args
    counts = tokens_by_block(best, pages, page_tokens, len(blocks), block)
    stored = store.counts[blocks[:kept_blocks]].sum((0, -1))
    assert (counts.sum(0) == stored).all(), "the cache does not hold the kept tokens"
    return summary(counts, block, 0)


@torch.inference_mode()
def main() -> None:
    from transformers import AutoModelForCausalLM

    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", choices=fetch.MODELS, default="qwen-0.5b")
    p.add_argument("--contexts", type=int, default=4, help="half of them with needles, half dictionaries")
    p.add_argument("--length", type=int, default=2048)
    p.add_argument("--block", type=int, default=128)
    args = p.parse_args()
    folder, device = fetch.MODELS[args.model](), "cuda" if torch.cuda.is_available() else "cpu"
    maker = Maker(prompts.tokenizer(folder), fetch.essays().read_text())
    contexts = [(maker.needles, maker.dictionary)[i % 2](i // 2, args.length) for i in range(args.contexts)]
    texts = [torch.tensor([*c.ids, *c.questions[0].ask], device=device) for c in contexts]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    numbers = {"args": vars(args), "tokens": [len(text) for text in texts], "cells": {}}
    for cell, budget in CELLS.items():
        rows = [packed(model, text, args.block, budget) for text in texts]
        numbers["cells"][cell] = n = mean(rows)
        print(f"{cell:12} kept {n['kept']:.1%}, variance {n['variance']}, at the floor {n['at_floor']:.1%}", flush=True)
        common.write_result(f"quality/spread_{args.model}", numbers, quiet=len(numbers["cells"]) < len(CELLS))


if __name__ == "__main__":
    main()
