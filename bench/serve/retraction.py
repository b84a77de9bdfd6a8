"""Recomputed tokens when sessions outgrow the memory, in SGLang's scheduler without a model.

    python -m bench.serve.retraction [--sessions 64] [--quick]

Sessions start one by one. Their answers together exceed the memory, so SGLang retracts some requests and resumes them
later. All prefilled tokens beyond the first prefill of each prompt are counted. `freed`: a retracted request frees all
of its tokens, as in stock SGLang. `kept`: its full blocks stay in the prefix cache. `hosted`: there is also a host
tier. `demoted`: blocks move down to `k2v2` before a retraction. `reserved`: admission always reserves RATIO of the
longest answers (SGLANG_INIT_NEW_TOKEN_RATIO=0.8, SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR=1). Counts are exact and do not
depend on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
from types import SimpleNamespace
from unittest import mock

import torch
from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import NewTokenRatioTracker
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from triton.runtime.jit import JITFunction

from bench.common import Score, write_result
from bench.scheduler import configured
from bench.serve import host_step
from kvc_kernels.store import PageStore
from kvc_patches import scheduler as hooks
from sglang_kvc.adapter.allocator import KvcAllocator
from sglang_kvc.adapter.radix_cache import KvcRadixCache
from sglang_kvc.cache.build import build_runtime
from sglang_kvc.cache.sizing import HostLayout
from sglang_kvc.options.config import KvcConfig

P = host_step.P
RATIO = 0.8


class Server(host_step.Server):
    """Scheduler that counts prefilled tokens and retractions."""

    def __init__(self, *args):
        super().__init__(*args)
        self.prefilled = self.retracted = self.turns = 0
        self.requests: list = []

    def run_batch(self, batch, pp_proxy_tensors=None):
        if batch.forward_mode.is_extend():
            self.prefilled += batch.extend_num_tokens
        return super().run_batch(batch, pp_proxy_tensors)

    def submit(self, i: int, tokens: int, answer: int) -> None:
        super().submit(i, tokens, answer)
        self.requests.append(self.waiting_queue[-1])
        self.requests[-1].sampling_params.ignore_eos = False  # SGLang then reserves less than the longest answer

    def run(self, args) -> None:
        """Start a session every `args.every` turns and run until all requests have ended."""
        for self.turns in range(args.sessions * (args.every + args.prompt + args.answer)):
            i, later = divmod(self.turns, args.every)
            if i < args.sessions and not later:
                self.submit(i, args.prompt, args.answer)
            if self.turn() == 0 and self.last_batch is None:
                hooks.before_on_idle(self)
                if i >= args.sessions and all(req.finished() for req in self.requests):
                    break
        assert all(req.finished() for req in self.requests), "requests wait forever"
        self.retracted = sum(req.retraction_count for req in self.requests)


def measure(
    args, *, keep_blocks: bool = True, hosted: bool = False, floor: str | None = None, ratio: float | None = None
) -> dict[str, int]:
    length = args.prompt + args.answer
    block_bytes = 2 * host_step.HEADS * host_step.HEAD_DIM * P * 2
    needed = args.sessions * -(-length // P) * block_bytes
    shape = {"layers": host_step.LAYERS, "heads": host_step.HEADS, "head_dim": host_step.HEAD_DIM}
    size = int(args.memory * needed)
    config = KvcConfig(block_size=P, floor=floor)
    runtime = build_runtime(config, num_bytes=size, dtype=torch.bfloat16, device="cpu", **shape)
    if hosted:  # the same number of pages, plus the tier's buffers
        size += HostLayout.of(runtime.layout, runtime.store.block_formats, size).device_bytes
        config = KvcConfig(block_size=P, host_memory=needed)
        runtime = build_runtime(config, num_bytes=size, dtype=torch.bfloat16, device="cpu", **shape)
    free_all = mock.patch.object(KvcRadixCache, "keep_retracted", lambda self, req: None)
    retraction = contextlib.nullcontext() if keep_blocks else free_all
    with configured(runtime, rows=args.sessions, chunk=args.chunk):
        pool = ReqToTokenPool(args.sessions, length + P, "cpu", enable_memory_saver=False)
        allocator = KvcAllocator(runtime, SimpleNamespace(runtime=runtime), "cpu")
        tree = KvcRadixCache(CacheInitParams(False, pool, allocator, P))
        server = Server(runtime, pool, allocator, tree, args.sessions)
        server.chunked_prefill_size = args.chunk
        if ratio is not None:
            server.new_token_ratio_tracker = NewTokenRatioTracker(init=ratio, min=ratio, decay=0.0, current=ratio)
        if hosted:
            tree.init_hicache(None, None)
            server.enable_hierarchical_cache = True
        with retraction:
            server.run(args)
    prompts = sum(len(req.origin_input_ids) for req in server.requests)
    return {
        "prefilled_again": server.prefilled - prompts,
        "retractions": server.retracted,
        "turns": server.turns,
        "prompt_tokens": prompts,
        "pages": runtime.sizing.num_pages,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--answer", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--every", type=int, default=8, help="decode steps between two sessions")
    parser.add_argument("--memory", type=float, default=0.15, help="share of the uncompressed size of all sessions")
    parser.add_argument("--quick", action="store_true", help="few short sessions, no result file")
    args = parser.parse_args()
    if args.quick:
        args.sessions, args.prompt, args.answer, args.chunk, args.memory = 8, 2 * P, 12 * P, 2 * P, 0.1
    torch.set_num_threads(1)
    no_launch = mock.patch.object(JITFunction, "run", lambda *args, **options: None)
    with no_launch, mock.patch.object(PageStore, "use_kernels", True):
        rows = {
            "freed": measure(args, keep_blocks=False),
            "kept": measure(args),
            "demoted": measure(args, floor="k2v2"),
            "reserved": measure(args, ratio=RATIO),
        }
    rows["hosted"] = measure(args, hosted=True)  # the tier reads pages
    for name, row in rows.items():
        print(f"{name:8}" + "".join(f"{count:>18} {value:9}" for count, value in row.items()))
    if not args.quick:
        recomputed = {name: row["prefilled_again"] for name, row in rows.items()}
        unit = f"of the tokens prefilled again by {args.sessions} sessions of {args.prompt} + {args.answer} tokens"
        baseline = "a retraction frees all"
        scores = {
            "papers.retraction_recompute": Score(recomputed["hosted"] / recomputed["freed"], unit, baseline),
            "papers.retraction_recompute_pool": Score(recomputed["kept"] / recomputed["freed"], unit, baseline),
            "papers.retraction_recompute_demoted": Score(recomputed["demoted"] / recomputed["freed"], unit, baseline),
            "papers.retraction_recompute_reserved": Score(recomputed["reserved"] / recomputed["freed"], unit, baseline),
        }
        write_result("serve/retraction", rows | vars(args), scores=scores)


if __name__ == "__main__":
    main()
