"""A server that is killed under load and started again on its disk tier, and what it does with damaged files.

    python -m bench.serve.restart [--prompts 1000]

Prompts of two blocks and a few tokens are answered, and answered again from the cache. SIGKILL ends the server while
others ask. The next server on the same folder must hit what was written and give the same log-probabilities
(`agents.restart_warm_hit`: the share of those tokens that it hits). Then one file of each prompt is cut short or gets
one wrong bit. A block counts as served though damaged (`agents.corrupt_served`) if a prompt hits tokens behind it, or
if its answer changed. The model is small and random: its log-probabilities tell other bytes from the right ones.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import tempfile
import threading
from array import array
from pathlib import Path

from bench import common
from bench.client import Answer, RequestRefused
from bench.common import Score, write_result
from bench.tiny import tiny_model

BLOCK, BLOCKS = 64, 2
HIT = BLOCK * BLOCKS
PARALLEL, NEW = 8, 4
# Log-probabilities of a block that was read and of the same block computed again, in a batch of another shape.
SAME = 1e-3


def options(folder: Path, prompts: int) -> list[str]:
    memory = max(8, prompts * BLOCKS // 50)  # MiB: all blocks several times
    host = ["--kvc-host-memory", f"{memory}MiB", "--kvc-disk", str(folder)]
    return common.either("k4v4", *host, "--sleep-on-idle", block=BLOCK, memory=f"{2 * memory}MiB")


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


def killed_under_load(server: common.Server, rng: random.Random) -> None:
    """SIGKILL while requests that are new to the server run."""
    over = threading.Event()

    def ask() -> None:
        draw = random.Random(rng.random())
        with contextlib.suppress(OSError, RequestRefused):
            while not over.is_set():
                server.client.generate(draw.choices(range(1000, 9000), k=5 * BLOCK), 8)

    load = [threading.Thread(target=ask) for _ in range(PARALLEL)]
    for thread in load:
        thread.start()
    over.wait(5)
    os.killpg(server.process.pid, signal.SIGKILL)
    over.set()
    for thread in load:
        thread.join()
    server.stop()


def changed(before: Answer, after: Answer) -> bool:
    drift = max(abs(a - b) for a, b in zip(before.logprobs, after.logprobs, strict=True))
    return before.ids != after.ids or drift > SAME


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--prompts", type=int, default=1000)
    p.add_argument("--name", default="serve/restart")
    a = p.parse_args()
    rng = random.Random(0)
    prompts = [rng.choices(range(1000, 9000), k=HIT + 9) for _ in range(a.prompts)]
    with tempfile.TemporaryDirectory(prefix="kvc-restart-") as folder:
        disk = Path(folder) / "disk"
        server = common.Server(options(disk, a.prompts), model=tiny_model(Path(folder) / "model"))

        def ask() -> list[Answer]:
            return server.client.generate_many(prompts, NEW, parallel=PARALLEL, logprobs=True)

        with server:
            ask()
            before = ask()
            written = server.client.when_idle()
            killed_under_load(server, rng)
            server.start()
            warm = ask()
            read = server.client.when_idle()
            server.stop()
            places = [rng.randrange(BLOCKS) for _ in prompts]
            for prompt, place in zip(prompts, places, strict=True):
                damage(files_of(disk, prompt)[place], rng)
            server.start()
            after = ask()
            found = server.client.when_idle()
    expected = sum(x.cached_tokens for x in before)
    behind = sum(x.cached_tokens > place * BLOCK for x, place in zip(after, places, strict=True))
    wrong = sum(map(changed, before, after))
    numbers = {
        "prompts": a.prompts, "files_before_kill": written["disk_blocks"], "hit_before": expected,
        "hit_after_kill": sum(x.cached_tokens for x in warm), "changed_after_kill": sum(map(changed, before, warm)),
        "damaged_after_kill": read["disk_damaged"], "damaged_found": found["disk_damaged"], "hit_behind_damage": behind,
        "changed_by_damage": wrong,
    }  # fmt: skip
    print(numbers)
    scores = {
        "agents.restart_warm_hit": Score(
            numbers["hit_after_kill"] / expected, "share of the tokens that hit before SIGKILL", n=a.prompts
        ),
        "agents.corrupt_served": Score(max(behind, wrong), f"damaged files served, of {a.prompts}", n=a.prompts),
    }
    write_result(a.name, numbers, scores=scores)


if __name__ == "__main__":
    main()
