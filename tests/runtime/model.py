"""A toy server around the real tree, allocator, ledger and page store, with KV rows that encode the history of each
token.

Every token's key row is a function of the whole prefix that leads to it, so a block that is filed under the wrong
prefix, is overwritten, or loses its pages shows up as a wrong row.
"""

from __future__ import annotations

import itertools
from array import array
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from kvc_kernels import ops
from kvc_kernels.layout import PoolLayout
from kvc_kernels.store import PageStore
from sglang_kvc.adapter.allocator import KvcAllocator
from sglang_kvc.adapter.radix_cache import KvcRadixCache
from sglang_kvc.cache.blocks import Blocks
from sglang_kvc.cache.ledger import Ledger
from sglang_kvc.cache.runtime import Runtime
from sglang_kvc.cache.sizing import size_pool
from sglang_kvc.options.config import KvcConfig
from sglang_kvc.options.request_quality import LOSSLESS, namespace
from sglang_kvc.policies import Prune, make_policy

P, L, H, D = 64, 2, 2, 32
ROWS, CONTEXT = 8, 1024
ONE_RANK = SimpleNamespace(tp_size=1, dp_size=1, nnodes=1, enable_dp_attention=False)  # of a server's arguments


def make_runtime(blocks: int = 12, **options) -> Runtime:
    """A pool that holds `blocks` uncompressed blocks of P = 64 tokens."""
    config = KvcConfig(block_size=P, **{"window": 32, **options})
    policy = make_policy(config)
    layout = PoolLayout(L, H, D, P, page_bytes=config.page_bytes or 1152, has_scores=policy.collects_scores)
    block_formats = policy.block_formats(layout)
    num_bytes = int((blocks + 1) * 1.1 * layout.block_pages_bf16 * layout.page_bytes * 1.3)
    sizing = size_pool(num_bytes, layout, block_formats)
    store = PageStore.create(
        layout, block_formats, num_pages=sizing.num_pages, num_blocks=sizing.num_blocks, dtype=torch.bfloat16,
        device="cpu"
    )
    ledger = Ledger(sizing.num_blocks, sizing.chargeable_pages)
    return Runtime(config, policy, layout, sizing, store, ledger, Blocks(sizing.num_blocks))


def row(tokens: list[int]) -> np.ndarray:
    """Key row `[H, D]` of the last of `tokens`: small whole numbers that bf16 holds exactly."""
    state = np.random.default_rng(abs(hash(tuple(tokens))) % 2**32)
    return state.integers(-8, 8, size=(H, D)).astype(np.float32)


class Request(SimpleNamespace):
    """The attributes of SGLang's `Req` that the tree and the allocator use."""

    aborted = False  # or finished
    finished_reason = None

    def finished(self) -> bool:
        return self.aborted

    @property
    def full_untruncated_fill_ids(self):
        return self.origin_input_ids + self.output_ids


class ToyServer:
    def __init__(self, disable: bool = False, tree: dict | None = None, **options):
        self.runtime = make_runtime(**options)
        self.rows = SimpleNamespace(
            req_to_token=torch.zeros((ROWS + 1, CONTEXT), dtype=torch.int32), free=list(range(1, ROWS + 1))
        )
        self.rows.write = lambda at, value: self.rows.req_to_token.__setitem__(at, value.to(torch.int32))
        pool = SimpleNamespace(runtime=self.runtime)
        self.allocator = KvcAllocator(self.runtime, pool, "cpu")
        self.tree = KvcRadixCache(CacheInitParams(disable, self.rows, self.allocator, P, **(tree or {})))
        self.running: list[Request] = []
        self.ids = itertools.count()

    # ---- what the scheduler does

    def admit(
        self, tokens: list[int], chunk: int | None = None, level: str | None = None, queued=None, use=None
    ) -> Request | None:
        """Prefill `tokens` (in chunks of `chunk`) at a level; None when there is no memory or no row. `queued` is a
        request that has passed the queue's hook and gives the namespace; `use` is its session."""
        if not self.rows.free:
            return None
        req = Request(
            origin_input_ids=array("q", tokens), output_ids=array("q"), extra_key=None, priority=0, kvc=None,
            kv=ReqKvInfo(), lock=None, cache_salt=getattr(queued, "cache_salt", None), session=None, session_id=None,
            fill=len(tokens), rid=str(next(self.ids)), kvc_level=level,
        )
        req.extra_key = namespace(None, level) if queued is None else queued.extra_key
        req.kvc_private = queued is not None and queued.kvc_private
        if use is not None:
            req.kvc_use, req.kvc_hints = use.kvc_use, use.kvc_hints
        key = RadixKey(req.origin_input_ids, req.extra_key, cache_salt=req.cache_salt, limit=len(tokens) - 1)
        match = self.tree.match_prefix(MatchPrefixParams(key=key))
        req.prefix_len, req.last_node = match.device_prefix_len, match.last_device_node
        req.kv.cache_protected_len = req.prefix_len
        req.lock = self.tree.lock(req.last_node)
        free_tokens = self.allocator.available_size() + self.tree.evictable_size()
        if len(tokens) - req.prefix_len + 2 * P > free_tokens:
            self.tree.unlock(req.lock)
            return None
        self.tree.note_admitted(req)
        prefix = self.tree.prefix_device_indices(req)
        req.kv.req_pool_idx = self.rows.free.pop()
        self.rows.req_to_token[req.kv.req_pool_idx, : req.prefix_len] = prefix.to(torch.int32)
        self.running.append(req)
        req.fill = req.prefix_len
        while req.fill < len(tokens):
            req.fill = min(req.fill + (chunk or len(tokens)), len(tokens))
            self._extend(req)
            self.tree.checkpoint(req, up_to=req.fill)
            req.prefix_len = req.fill
        return req

    def _extend(self, req: Request) -> None:
        from kvc_patches.allocation import around_alloc_for_extend

        done = req.prefix_len
        batch = SimpleNamespace(
            reqs=[req], tree_cache=self.tree, token_to_kv_pool_allocator=self.allocator,
            seq_lens_cpu=torch.tensor([req.fill]),
        )

        def stock(batch):
            need = req.fill - done + P  # SGLang's slack of one page per request
            self.allocator.evict_to_free_tokens(self.tree, need)
            return self.allocator.alloc_extend(
                None, torch.tensor([done]), None, batch.seq_lens_cpu, None, req.fill - done
            )

        slots = around_alloc_for_extend(stock, batch)
        assert slots is not None, "an admitted prompt found no memory"
        self.rows.req_to_token[req.kv.req_pool_idx, done : req.fill] = slots.to(torch.int32)
        self._forward(req, done, slots)

    def decode(self, req: Request, token: int) -> bool:
        """One step: the KV of one more token. False when there is no memory for it."""
        from kvc_patches.allocation import around_alloc_for_decode

        n = len(req.origin_input_ids) + len(req.output_ids)
        if n + 1 >= CONTEXT:
            return False
        if n % P == 0 and self.allocator.available_size() < P:
            self.tree.evict(EvictParams(num_tokens=P - self.allocator.available_size()))
            if self.allocator.available_size() < P:
                return False
        batch = SimpleNamespace(
            reqs=[req], tree_cache=self.tree, token_to_kv_pool_allocator=self.allocator,
            seq_lens_cpu=torch.tensor([n]),
        )
        slots = around_alloc_for_decode(lambda b, k: self.allocator.alloc(len(b.reqs)), batch, 1)
        req.output_ids.append(token)
        self.rows.req_to_token[req.kv.req_pool_idx, n] = int(slots[0])
        self._forward(req, n, slots)
        return True

    def finish(self, req: Request, insert: bool = True) -> None:
        """Does what `release_kv_cache` does. Without `insert` the request counts as aborted or retracted."""
        n = len(req.origin_input_ids) + len(req.output_ids)
        if insert:
            req.aborted = True
            self.tree.checkpoint(req, up_to=n)
        self.tree.free_kv_row(req.kv, [(req.kv.cache_protected_len, n)])
        self.tree.unlock(req.lock)
        req.lock = None
        self.tree.on_release(req, checkpointed=insert)
        self.rows.free.append(req.kv.req_pool_idx)
        self.running.remove(req)

    def _forward(self, req: Request, done: int, slots: torch.Tensor) -> None:
        self.runtime.step += 1
        self.runtime.flush()
        tokens = list(req.origin_input_ids + req.output_ids)
        rows = torch.from_numpy(np.stack([row(tokens[: done + i + 1]) for i in range(len(slots))]))
        for layer in range(L):
            k = (rows + layer).to(torch.bfloat16)
            ops.append(self.runtime.store, layer, slots // P, slots % P, k, -k)
        self.runtime.processed += 1
        self.runtime.harvest(self.runtime.processed)

    def shrink(self, pages: int) -> None:
        """Demote blocks of the tree until `pages` more pages are free, or none is left to demote."""
        ledger = self.runtime.ledger
        goal = ledger.free + pages
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.runtime.capacity, "missing_pages", lambda tokens: goal - ledger.free)
            self.tree.component.demotions.make_room(P)

    # ---- what must hold

    def check(self) -> None:
        """Check that no slot leaks, each page is in one place, the ledger charges all pages in use, and rows are
        right."""
        self.runtime.flush()
        uncached = sum(
            -(-(len(r.origin_input_ids) + len(r.output_ids)) // P) * P - r.kv.cache_protected_len for r in self.running
        )
        assert self.allocator.used_slots() == self.tree.evictable_slots() + self.tree.protected_size() + uncached
        assert self.allocator.available_size() + self.tree.evictable_size() <= self.runtime.sizing.capacity_tokens
        ops.check_invariants(self.runtime.store)
        pages = pages_held(self.runtime.store)
        assert (pages <= self.runtime.ledger.charge).all()
        assert self.runtime.ledger.total == self.runtime.ledger.charge.sum() <= self.runtime.ledger.limit
        idle = self.runtime.ledger.idle
        assert self.runtime.ledger.idle_total == self.runtime.ledger.charge[idle].sum()
        for req in self.running:
            self.check_rows(req)

    def check_rows(self, req: Request) -> None:
        tokens = list(req.origin_input_ids + req.output_ids)
        for i, block in enumerate(req.kvc.blocks):
            block_tokens = tokens[i * P : (i + 1) * P]
            assert self.rows.req_to_token[req.kv.req_pool_idx, i * P] == block * P
            if req.kvc_level == LOSSLESS:
                assert int(self.runtime.store.format_id[block]) == 0
            want = torch.from_numpy(np.stack([row(tokens[: i * P + j + 1]) for j in range(len(block_tokens))]))
            got, _, tier = ops.load_dense(self.runtime.store, 0, torch.tensor([block]))
            if isinstance(self.runtime.policy, Prune) and self.runtime.store.format_id[block] > 0:
                continue  # tokens are chosen without positions: the page does not tell which row is which
            block_format = self.runtime.store.block_formats[int(self.runtime.store.format_id[block])]
            bits = min(f.key_bits for f in (block_format.high, block_format.low) if f is not None)
            # Half a quantization step over the rows' range of 15, plus the rounding of the scale.
            tolerance = 0.0 if not block_format.high.packed else 0.1 + 7.5 / (2**bits - 1)
            if self.runtime.demotion.enabled and bits < 4:
                tolerance += 0.6  # it may have had 4 bits before
            kept = tier[0, :, : len(block_tokens)] > 0
            error = (got[0, :, : len(block_tokens)].transpose(0, 1) - want).abs().amax(-1).transpose(0, 1)
            assert not kept.any() or error[kept].max() <= tolerance


def pages_held(store: PageStore) -> np.ndarray:
    """Pages of every block by its counts, independent of the ledger."""
    layout, pages = store.layout, np.zeros(len(store.format_id), dtype=np.int64)
    for block, format_id in enumerate(store.format_id.tolist()):
        if block == 0 or format_id < 0:
            continue
        if format_id == 0:
            pages[block] = layout.block_pages_bf16
            continue
        for tier, fmt in enumerate((store.block_formats[format_id].high, store.block_formats[format_id].low)):
            if fmt is not None:
                n = store.counts[block, :, :, tier].to(torch.int64)
                pages[block] += int((-(-n // layout.page(fmt).tokens)).sum())
    return pages
