"""Restart of a server on its disk tier after a kill under load, with most files damaged.

    python -m bench.serve.restart [--prompts 1000] [--parallel N]

A server answers prompts of two blocks and a few tokens twice, the second time from its cache. SIGKILL ends it while
other requests run. For each of `--prompts` prompts, one file is then truncated or gets a flipped bit; a fifth as many
prompts keep intact files. A new server on the same folder gets all prompts again. The benchmark runs on the CPU engine,
where a recomputed block gives the same answer. On a GPU, other batch shapes round differently.

`agents.restart_warm_hit` is the share of earlier hit tokens that hit again, for prompts with intact files. A damaged
block counts as served (`agents.corrupt_served`) if a prompt hits tokens after it, or if its answer changed. The run
fails unless the server detects every damaged file. The small random model's log-probabilities differ between prompts;
`control_changed` is the share of neighboring prompts that `changed` tells apart.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import signal
import sys
import tempfile
import threading
import time
from array import array
from pathlib import Path

from bench import common
from bench.client import Answer, RequestRefused
from bench.common import Score, has_gpu, write_result
from bench.compare import match
from bench.tiny import tiny_model

BLOCK, BLOCKS = 64, 2
HIT = BLOCK * BLOCKS
PARALLEL = 8
NEW, TOP = 4, 3
# Maximum difference in log-probability between a block that was read and the same block recomputed in another batch.
SAME = 1e-3


def options(folder: Path, prompts: int) -> list[str]:
    memory = max(8, prompts * BLOCKS // 25)  # MiB; a packed block takes 27 KB
    extra = ["--kvc-host-memory", f"{memory}MiB", "--kvc-disk", str(folder), "--sleep-on-idle"]
    extra += ["--enable-fp32-lm-head", "--skip-server-warmup"]
    return common.either("k4v4", *extra, block=BLOCK, memory=f"{2 * memory}MiB")


def files_of(folder: Path, ids: list[int]) -> list[Path]:
    """Files of a prompt's full blocks, in order."""
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    names = get_storage_hash_str(RadixKey(array("q", ids[:HIT])), page_size=BLOCK)
    return [next(folder.glob(f"*/{name[:2]}/{name}.kvc")) for name in names]


def damage(path: Path, rng: random.Random) -> None:
    """Truncate the file at a random place, or flip one of its bits."""
    content = bytearray(path.read_bytes())
    at = rng.randrange(len(content))
    if rng.random() < 0.5:
        del content[at:]
    else:
        content[at] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def kill_under_load(server: common.Server, rng: random.Random, parallel: int) -> None:
    """Send SIGKILL while the server computes new prompts."""
    stop = threading.Event()

    def ask() -> None:
        draw = random.Random(rng.random())
        with contextlib.suppress(OSError, RequestRefused):
            while not stop.is_set():
                server.client.generate(draw.choices(range(1000, 9000), k=5 * BLOCK), 8)

    load = [threading.Thread(target=ask) for _ in range(parallel)]
    for thread in load:
        thread.start()
    stop.wait(5)
    os.killpg(server.process.pid, signal.SIGKILL)
    stop.set()
    for thread in load:
        thread.join()
    server.stop()


def changed(before: Answer, after: Answer) -> bool:
    """Whether two answers differ by more than rounding."""
    result = match(before, after)
    return result.drift > SAME or not result.same


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--prompts", type=int, default=1000, help="number of prompts with a damaged file")
    p.add_argument("--parallel", type=int, default=PARALLEL, help="concurrent requests")
    p.add_argument("--name", default="serve/restart")
    args = p.parse_args()
    if has_gpu():
        p.error("answers are compared on the CPU engine; run with CUDA_VISIBLE_DEVICES= (empty)")
    rng, began = random.Random(0), time.monotonic()
    intact = -(-args.prompts // 5)
    prompts = [rng.choices(range(1000, 9000), k=HIT + 9) for _ in range(args.prompts + intact)]
    damaged_blocks = [rng.randrange(BLOCKS) for _ in range(args.prompts)]
    with tempfile.TemporaryDirectory(prefix="kvc-restart-") as folder:
        disk = Path(folder) / "disk"
        server = common.Server(options(disk, len(prompts)), model=tiny_model(Path(folder) / "model"))

        def ask() -> list[Answer]:
            return server.client.generate_many(prompts, NEW, parallel=args.parallel, top=TOP)

        with server:
            ask()
            before = ask()
            stats = server.client.when_idle()
            kill_under_load(server, rng, args.parallel)
            for prompt, damaged_block in zip(prompts, damaged_blocks):
                damage(files_of(disk, prompt)[damaged_block], rng)
            server.start()
            after = ask()
            detected = server.client.when_idle()["disk_damaged"]
    different = [changed(x, y) for x, y in zip(before, after, strict=True)]
    hits_after_damage = sum(x.cached_tokens > damaged_block * BLOCK for x, damaged_block in zip(after, damaged_blocks))
    expected, hit = (sum(x.cached_tokens for x in answers[args.prompts :]) for answers in (before, after))
    control = [changed(x, y) for x, y in itertools.pairwise(before)]
    numbers = {
        "prompts": args.prompts, "whole_prompts": intact, "parallel": args.parallel,
        "seconds": time.monotonic() - began,
        "files_before_kill": stats["disk_blocks"], "hit_before": expected, "hit_after_kill": hit,
        "changed_after_kill": sum(different[args.prompts :]), "damaged_found": detected,
        "hit_before_damage": sum(x.cached_tokens for x in after[: args.prompts]),
        "could_hit_before_damage": BLOCK * sum(damaged_blocks), "hit_behind_damage": hits_after_damage,
        "changed_by_damage": sum(different[: args.prompts]), "control_changed": sum(control) / len(control),
    }  # fmt: skip
    print(numbers)
    wrong = max(hits_after_damage, sum(different[: args.prompts]))
    scores = {
        "agents.restart_warm_hit": Score(hit / expected, "share of the tokens that hit before SIGKILL", n=intact),
        "agents.corrupt_served": Score(wrong, f"damaged files served, of {args.prompts}", n=args.prompts),
    }
    write_result(args.name, numbers, scores=scores)
    if detected != args.prompts:
        print(f"error: the server detected {detected} damaged files, not {args.prompts}")
    return int(detected != args.prompts or wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
