"""Check that a block's packed bytes depend only on its own K/V rows and the policy.

    python -m bench.serve.page_hash [--blocks 12] [--block 64] [--histories 20] [--device cuda] [--name NAME]

The model's K and V rows of a real text are captured once. Random histories then write them to fresh caches through the
runtime's queue: blocks in any order, rows in pieces of any size, blocks packed alone or together, page ids reused after
evictions. The digest of every block (format id, counts, key header, page bytes) must equal that of the same block
packed alone in an empty cache. As a control, rows with a single changed element must give another digest. On a GPU (the
default if there is one), kernels write the pages, and the blocks whose bytes equal those of plain torch on the CPU are
counted, too.
"""

from __future__ import annotations

import argparse
import random
import sys

import torch

from bench import common, prompts
from kvc_kernels import ops
from sglang_kvc.cache.build import build_runtime
from sglang_kvc.options.config import KvcConfig
from sglang_kvc.options.validate import check_settings

NAME = "serve/page_hash"
# Policies of scope `block`. LeanKV's choice depends on the request that filled the block, by definition.
CONFIGS = {
    **{f: {"high": f} for f in ("k8v8", "k8v4", "k4v4", "k4v2", "k2v2")},
    "quota": {"policy": "quota"},
}


def capture(model_dir, tok, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K (after RoPE) and V of a real text, bf16 `[L, tokens, H, D]`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    ids = torch.tensor([prompts.cut(tok, prompts.prose(), tokens)])
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    layers = range(len(cache))
    k = torch.stack([cache.layers[i].keys[0].transpose(0, 1) for i in layers])
    v = torch.stack([cache.layers[i].values[0].transpose(0, 1) for i in layers])
    return k.contiguous(), v.contiguous()


class Replay:
    """A cache and the blocks of the text that it holds."""

    def __init__(self, config: KvcConfig, k: torch.Tensor, v: torch.Tensor, capacity: int):
        """`capacity`: blocks. The cache is on the device of `k` and `v`."""
        layers, _, heads, dim = k.shape
        size = {"layers": layers, "heads": heads, "head_dim": dim}
        num_bytes = capacity * config.block_size * layers * heads * dim * 4 * 3 // 2
        self.runtime = build_runtime(config, num_bytes=num_bytes, dtype=k.dtype, device=k.device, **size)
        self.k, self.v, self.p = k, v, config.block_size
        self.block_ids: dict[int, int] = {}  # block of the text -> block id in the cache

    def write(self, indices: list[int], rng: random.Random) -> None:
        """Take a block for each of `indices` and write their rows in random pieces."""
        ids = self.runtime.take([i * self.p for i in indices])
        assert ids is not None, "the cache is too small for this history"
        self.runtime.flush()
        places = dict(zip(indices, ids))
        pending = [(i, at) for i in indices for at in range(self.p)]
        while pending:
            n = rng.randint(1, 3 * self.p)
            self._append(pending[:n], places)
            pending = pending[n:]
        for i in indices:
            self.runtime.blocks.num_tokens[places[i]] = self.p
        self.block_ids.update(places)

    def _append(self, piece: list[tuple[int, int]], places: dict[int, int]) -> None:
        device = self.k.device
        blocks = torch.tensor([places[i] for i, _ in piece], device=device)
        offsets = torch.tensor([at for _, at in piece], device=device)
        rows = torch.tensor([i * self.p + at for i, at in piece], device=device)
        for layer in range(self.k.shape[0]):
            ops.append(self.runtime.store, layer, blocks, offsets, self.k[layer, rows], self.v[layer, rows])

    def pack(self, indices: list[int]) -> None:
        assert self.runtime.queue_due([self.block_ids[i] for i in indices]) == len(indices)
        self.runtime.flush()

    def drop(self, indices: list[int]) -> None:
        self.runtime.free([self.block_ids.pop(i) for i in indices])
        self.runtime.flush()

    def digest(self, i: int) -> str:
        return ops.block_digest(self.runtime.store, self.block_ids[i])


def digest_alone(config: KvcConfig, k: torch.Tensor, v: torch.Tensor, i: int) -> str:
    replay = Replay(config, k, v, 8)
    replay.write([i], random.Random(0))
    replay.pack([i])
    return replay.digest(i)


def history(config: KvcConfig, k, v, blocks: int, seed: int) -> tuple[list[tuple[int, str]], set[int]]:
    """Random history of a cache: (block of the text, digest) of every packing, and the page ids used."""
    rng = random.Random(seed)
    replay = Replay(config, k, v, blocks + 6)
    digests: list[tuple[int, str]] = []
    pages: set[int] = set()
    todo = rng.sample(range(blocks), blocks) * 2  # every block is evicted once and written again
    waiting: list[int] = []
    while todo or waiting:
        fresh = [i for i in dict.fromkeys(todo[: rng.randint(1, 4)]) if i not in replay.block_ids]
        for i in fresh:
            todo.remove(i)
        if fresh:
            replay.write(fresh, rng)
            waiting += fresh
        elif todo:
            packed = [i for i in dict.fromkeys(todo) if i in replay.block_ids and i not in waiting]
            if packed:
                replay.drop(rng.sample(packed, rng.randint(1, len(packed))))
        rng.shuffle(waiting)
        n = rng.randint(1, 5)
        now, waiting = waiting[:n], waiting[n:]
        if now:
            replay.pack(now)
            digests += [(i, replay.digest(i)) for i in now]
            pages.add(int(replay.runtime.store.table[replay.block_ids[now[0]], 0, 0, 0]))
    # Blocks that were packed early must not have changed since.
    digests += [(i, replay.digest(i)) for i in replay.block_ids]
    ops.check_invariants(replay.runtime.store)
    return digests, pages


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=12, help="blocks of real text")
    parser.add_argument("--block", type=int, default=64, help="tokens of a block")
    parser.add_argument("--histories", type=int, default=20)
    parser.add_argument("--device", default="cuda" if common.has_gpu() else "cpu")
    parser.add_argument("--name", default=NAME, help="name of the result file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = common.demo_model()
    on_cpu = capture(model, prompts.tokenizer(model), args.blocks * args.block)
    k, v = (x.to(args.device) for x in on_cpu)
    rows, equal, total, control = {}, 0, 0, True
    for name, options in CONFIGS.items():
        config = check_settings(KvcConfig(block_size=args.block, **options))
        expected = [digest_alone(config, k, v, i) for i in range(args.blocks)]
        changed = k.clone()
        changed[-1, 3, -1, 5] += 8
        control &= digest_alone(config, changed, v, 0) != expected[0] and len(set(expected)) == args.blocks
        digests, first_pages = [], set()
        for seed in range(args.histories):
            history_digests, pages = history(config, k, v, args.blocks, seed)
            digests += history_digests
            first_pages |= pages
        matches = sum(expected[i] == d for i, d in digests)
        rows[name] = {"digests": len(digests), "equal": matches, "different_first_pages": len(first_pages)}
        if k.device.type != "cpu":
            rows[name]["as_on_cpu"] = sum(digest_alone(config, *on_cpu, i) == d for i, d in enumerate(expected))
        print(name, rows[name], flush=True)
        equal, total = equal + matches, total + len(digests)
    baseline = "the same rows packed alone"
    scores = {"serve.page_hash_match": common.Score(equal / total, "share of packed blocks", baseline, n=total)}
    numbers = {"block": args.block, "blocks": args.blocks, "histories": args.histories, "configs": rows}
    common.write_result(args.name, {**numbers, "control_differs": control}, scores=scores)
    return 0 if equal == total and control else 1


if __name__ == "__main__":
    sys.exit(main())
