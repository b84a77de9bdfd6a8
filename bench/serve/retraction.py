"""Tokens that are prefilled again when sessions grow past memory, in SGLang's own scheduler without a model.

    python -m bench.serve.retraction [--sessions 64] [--quick]

Sessions begin one after the other. Their answers together exceed the memory, so SGLang retracts some and resumes them
later. Every prefilled token beyond the first prefill of each prompt is counted. `freed` is SGLang's behavior: a
retracted request frees all of its tokens. `kept` leaves its full blocks to the prefix cache, and `hosted` also has host
memory behind the pool. Counts are exact and depend on no machine.
"""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from unittest import mock

import torch
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


class Server(host_step.Server):
    """Counts prefilled tokens and retractions, until all requests have ended."""

    def __init__(self, *args):
        super().__init__(*args)
        self.prefilled = self.retracted = 0
        self.requests: list = []

    def run_batch(self, batch, pp_proxy_tensors=None):
        if batch.forward_mode.is_extend():
            self.prefilled += batch.extend_num_tokens
        return super().run_batch(batch, pp_proxy_tensors)

    def submit(self, i: int, tokens: int, answer: int) -> None:
        super().submit(i, tokens, answer)
        self.requests.append(self.waiting_queue[-1])
        self.requests[-1].sampling_params.ignore_eos = False  # SGLang plans less than the longest answer

    def run(self, args) -> None:
        """A session begins every `args.every` turns."""
        for turn in range(args.sessions * (args.every + args.prompt + args.answer)):
            i, later = divmod(turn, args.every)
            if i < args.sessions and not later:
                self.submit(i, args.prompt, args.answer)
            if self.turn() == 0 and self.last_batch is None:
                hooks.before_on_idle(self)
                if i >= args.sessions and all(req.finished() for req in self.requests):
                    break
        assert all(req.finished() for req in self.requests), "requests wait for ever"
        self.retracted = sum(req.retraction_count for req in self.requests)


def measure(args, *, kept: bool, hosted: bool) -> dict[str, int]:
    length = args.prompt + args.answer
    block_bytes = 2 * host_step.HEADS * host_step.HEAD_DIM * P * 2
    needed = args.sessions * -(-length // P) * block_bytes
    shape = {"layers": host_step.LAYERS, "heads": host_step.HEADS, "head_dim": host_step.HEAD_DIM}
    size = int(args.memory * needed)
    runtime = build_runtime(KvcConfig(block_size=P), num_bytes=size, dtype=torch.bfloat16, device="cpu", **shape)
    if hosted:  # as many pages, beside the buffers
        size += HostLayout.of(runtime.layout, runtime.store.block_formats, size).device_bytes
        config = KvcConfig(block_size=P, host_memory=needed)
        runtime = build_runtime(config, num_bytes=size, dtype=torch.bfloat16, device="cpu", **shape)
    free_all = mock.patch.object(KvcRadixCache, "keep_retracted", lambda self, req: None)
    with configured(runtime, rows=args.sessions, chunk=args.chunk):
        pool = ReqToTokenPool(args.sessions, length + P, "cpu", enable_memory_saver=False)
        allocator = KvcAllocator(runtime, SimpleNamespace(runtime=runtime), "cpu")
        tree = KvcRadixCache(CacheInitParams(False, pool, allocator, P))
        server = Server(runtime, pool, allocator, tree, args.sessions)
        server.chunked_prefill_size = args.chunk
        if hosted:
            tree.init_hicache(None, None)
            server.enable_hierarchical_cache = True
        with mock.patch.object(KvcRadixCache, "keep_retracted", KvcRadixCache.keep_retracted) if kept else free_all:
            server.run(args)
    prompts = sum(len(req.origin_input_ids) for req in server.requests)
    return {
        "prefilled_again": server.prefilled - prompts,
        "retractions": server.retracted,
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
    parser.add_argument("--memory", type=float, default=0.15, help="share of what all sessions need uncompressed")
    parser.add_argument("--quick", action="store_true", help="few short sessions, no result file")
    args = parser.parse_args()
    if args.quick:
        args.sessions, args.prompt, args.answer, args.chunk, args.memory = 8, 2 * P, 12 * P, 2 * P, 0.1
    torch.set_num_threads(1)
    no_launch = mock.patch.object(JITFunction, "run", lambda *args, **options: None)
    with no_launch, mock.patch.object(PageStore, "use_kernels", True):
        rows = {
            "freed": measure(args, kept=False, hosted=False),
            "kept": measure(args, kept=True, hosted=False),
        }
    rows["hosted"] = measure(args, kept=True, hosted=True)  # host memory is read, so pages are really written
    for name, row in rows.items():
        print(f"{name:8}" + "".join(f"{count:>18} {value:9}" for count, value in row.items()))
    if not args.quick:
        again = {name: row["prefilled_again"] for name, row in rows.items()}
        unit = f"of the tokens prefilled again by {args.sessions} sessions of {args.prompt} + {args.answer} tokens"
        scores = {
            "papers.retraction_recompute": Score(again["hosted"] / again["freed"], unit, "a retraction frees all"),
            "papers.retraction_recompute_pool": Score(again["kept"] / again["freed"], unit, "a retraction frees all"),
        }
        write_result("serve/retraction", rows | vars(args), scores=scores)


if __name__ == "__main__":
    main()
