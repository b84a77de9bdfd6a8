"""A server that is killed under load and restarted on its disk tier after most files were damaged.

    python -m bench.serve.restart [--prompts 1000] [--parallel N]

Prompts of two blocks and a few tokens are answered, and answered again from the cache. SIGKILL ends the server while
other requests run. Then one file of each of `--prompts` prompts is truncated or gets one wrong bit; a fifth as many
prompts keep their files. All prompts are sent again to a new server on the same folder. It runs on the CPU engine,
where a block that is computed again gives the same answer; a GPU rounds differently in a batch of another shape.

`agents.restart_warm_hit` is the share of earlier hit tokens that hit again, for prompts with intact files. A damaged
block counts as served (`agents.corrupt_served`) if a prompt hits tokens after it, or if its answer changed. The run
fails unless the server found every damaged file. The model is small and random: its log-probabilities tell other
prompts from the right ones, which `control_changed` counts.
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
# Log-probabilities of a block that was read and of the same block computed again, in a batch of another shape.
SAME = 1e-3


def options(folder: Path, prompts: int) -> list[str]:
    memory = max(8, prompts * BLOCKS // 25)  # MiB; a packed block takes 27 KB
    extra = ["--kvc-host-memory", f"{memory}MiB", "--kvc-disk", str(folder), "--sleep-on-idle"]
    extra += ["--enable-fp32-lm-head", "--skip-server-warmup"]
    return common.either("k4v4", *extra, block=BLOCK, memory=f"{2 * memory}MiB")


def files_of(folder: Path, ids: list[int]) -> list[Path]:
    """The files of a prompt's full blocks, in their order."""
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    names = get_storage_hash_str(RadixKey(array("q", ids[:HIT])), page_size=BLOCK)
    return [next(folder.glob(f"*/{name[:2]}/{name}.kvc")) for name in names]


def damage(path: Path, rng: random.Random) -> None:
    """Cut the file at a random place, or turn one bit of it."""
    content = bytearray(path.read_bytes())
    at = rng.randrange(len(content))
    if rng.random() < 0.5:
        del content[at:]
    else:
        content[at] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def killed_under_load(server: common.Server, rng: random.Random, parallel: int) -> None:
    """SIGKILL while requests that are new to the server run."""
    over = threading.Event()

    def ask() -> None:
        draw = random.Random(rng.random())
        with contextlib.suppress(OSError, RequestRefused):
            while not over.is_set():
                server.client.generate(draw.choices(range(1000, 9000), k=5 * BLOCK), 8)

    load = [threading.Thread(target=ask) for _ in range(parallel)]
    for thread in load:
        thread.start()
    over.wait(5)
    os.killpg(server.process.pid, signal.SIGKILL)
    over.set()
    for thread in load:
        thread.join()
    server.stop()


def changed(before: Answer, after: Answer) -> bool:
    """Whether an answer is not the one before."""
    found = match(before, after)
    return found.drift > SAME or not found.same


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--prompts", type=int, default=1000, help="of which one file is damaged")
    p.add_argument("--parallel", type=int, default=PARALLEL, help="requests at a time")
    p.add_argument("--name", default="serve/restart")
    a = p.parse_args()
    if has_gpu():
        p.error("answers are compared on the CPU engine; set CUDA_VISIBLE_DEVICES to nothing")
    rng, began = random.Random(0), time.monotonic()
    whole = -(-a.prompts // 5)
    prompts = [rng.choices(range(1000, 9000), k=HIT + 9) for _ in range(a.prompts + whole)]
    places = [rng.randrange(BLOCKS) for _ in range(a.prompts)]
    with tempfile.TemporaryDirectory(prefix="kvc-restart-") as folder:
        disk = Path(folder) / "disk"
        server = common.Server(options(disk, len(prompts)), model=tiny_model(Path(folder) / "model"))

        def ask() -> list[Answer]:
            return server.client.generate_many(prompts, NEW, parallel=a.parallel, top=TOP)

        with server:
            ask()
            before = ask()
            written = server.client.when_idle()
            killed_under_load(server, rng, a.parallel)
            for prompt, place in zip(prompts, places):
                damage(files_of(disk, prompt)[place], rng)
            server.start()
            after = ask()
            found = server.client.when_idle()
    turned = [changed(x, y) for x, y in zip(before, after, strict=True)]
    behind = sum(x.cached_tokens > place * BLOCK for x, place in zip(after, places))
    expected, hit = (sum(x.cached_tokens for x in answers[a.prompts :]) for answers in (before, after))
    control = [changed(x, y) for x, y in itertools.pairwise(before)]
    numbers = {
        "prompts": a.prompts, "whole_prompts": whole, "parallel": a.parallel, "seconds": time.monotonic() - began,
        "files_before_kill": written["disk_blocks"], "hit_before": expected, "hit_after_kill": hit,
        "changed_after_kill": sum(turned[a.prompts :]), "damaged_found": found["disk_damaged"],
        "hit_before_damage": sum(x.cached_tokens for x in after[: a.prompts]),
        "could_hit_before_damage": BLOCK * sum(places), "hit_behind_damage": behind,
        "changed_by_damage": sum(turned[: a.prompts]), "control_changed": sum(control) / len(control),
    }  # fmt: skip
    print(numbers)
    wrong = max(behind, sum(turned[: a.prompts]))
    scores = {
        "agents.restart_warm_hit": Score(hit / expected, "share of the tokens that hit before SIGKILL", n=whole),
        "agents.corrupt_served": Score(wrong, f"damaged files served, of {a.prompts}", n=a.prompts),
    }
    write_result(a.name, numbers, scores=scores)
    if found["disk_damaged"] != a.prompts:
        print(f"error: the server found {found['disk_damaged']} damaged files, not {a.prompts}")
    return int(found["disk_damaged"] != a.prompts or wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
