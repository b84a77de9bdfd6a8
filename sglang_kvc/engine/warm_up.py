"""Warm-up: launches every kernel that a configuration can need before the server is ready.

Without it the first long prompts wait several seconds for the compiler. Triton compiles a kernel for each combination
of constants, of dtypes, and of integers divisible by 16. The warm-up therefore does not launch kernels directly. It
runs the serving code on a runtime of a few blocks with the server's layout, block formats and policy, with prompts on
both sides of every size at which that code switches kernels. Nothing here imports sglang.
"""

from __future__ import annotations

import gc
import itertools
import logging
import time
from collections.abc import Collection

import numpy as np
import torch

from kvc_kernels import ops
from kvc_kernels.store import PageStore

from ..cache.blocks import Blocks
from ..cache.ledger import Ledger
from ..cache.one_shot import PREFIX, why_unserved
from ..cache.op_queue import NO_GROUPS
from ..cache.runtime import Runtime
from ..cache.sizing import HostLayout, Sizing
from ..options.request_quality import offered
from .attention import Attention, Snapshot

logger = logging.getLogger(__name__)

BLOCKS = 4  # blocks of the small pool; longer prompts repeat them
# Sizes of warm-up prompts: new tokens, as query rows per KV head (tokens x query heads of its group) or as tokens, and
# tokens before them, rounded up to whole blocks.
ROWS, NEW, PREFIXES = (1, 12, 24, 48, 96, 192, 384, 768), (640, 2048), (0, 1, 4096)


def compile_ahead(runtime: Runtime, *, kinds: set[tuple[int, float]], **sizes) -> None:
    """Run `warm_up` and log one line.

    A failure does not stop the server: the kernel may never be needed, and if it is, it is compiled then or fails with
    its own message. RuntimeError if the failure has left the GPU unusable, as an illegal address does.
    """
    began = time.perf_counter()
    try:
        warm_up(runtime, kinds=kinds, **sizes)
    except Exception as error:
        text = (str(error).splitlines() or [""])[0]
        if not _gpu_answers():
            raise RuntimeError(
                f"The GPU is unusable after a kernel failed in the warm-up ({type(error).__name__}: {text}); start "
                f"with other --kvc options or with --kv-backend default"
            ) from error
        logger.warning(
            "Kernels could not be compiled ahead (%s: %s); the server starts anyway, but the first requests may wait "
            "for them or fail.", type(error).__name__, text,
        )  # fmt: skip
    else:
        logger.info("Kernels for this configuration are ready after %.1f s.", time.perf_counter() - began)
    # Free the memory of the small pool and FlashInfer before CUDA graphs are captured.
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _gpu_answers() -> bool:
    """Whether kernels can still be launched; true without a GPU."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def warm_up(
    runtime: Runtime,
    *,
    kinds: set[tuple[int, float]],
    query_heads: int,
    max_batch: int,
    max_blocks: int,
    windows: Collection[int] = (),
) -> None:
    """Launch the kernels of `runtime` on a small pool. `kinds`: (window, logit cap) of the model's layers; the sizes
    are those of the server's `Attention`."""
    small, policy = small_runtime(runtime), runtime.policy
    attention = Attention(
        small.store, policy.score_sampling, policy.fake_quant_format(policy.format_id_of(None)),
        query_heads=query_heads,
        max_batch=max_batch, max_blocks=max_blocks, windows=windows,
    )  # fmt: skip
    p = runtime.layout.block_tokens
    format_ids = range(len(small.store.block_formats))
    for format_id in format_ids:
        ids = small.take([p * i for i in range(BLOCKS)])
        small.flush()
        packed, open_blocks = ids[: BLOCKS // 2], ids[BLOCKS // 2 :]
        if format_id == 1 and PREFIX in offered(runtime.config):
            one_shot(small.store, ids)
        small.queue_due(packed, format_id, length=BLOCKS * p)
        small.flush()
        for to in [to for source, to in policy.moves if source == format_id]:
            at = np.asarray(packed)
            groups = np.array([[len(at), 1]]) if to == policy.answer_format else NO_GROUPS
            small.queue_move(
                at, from_format=format_id, to_format=to, lengths=np.full(len(at), BLOCKS * p), groups=groups
            )
            small.flush()
        if format_id == format_ids[-1]:
            for window, cap in sorted(kinds or {(-1, 0.0)}):
                layer = {"scale": 1.0, "logit_cap": cap, "window": window}
                decode(attention, packed, open_blocks, query_heads, layer)
                prompts(attention, packed, open_blocks, query_heads, max_blocks, layer)
        if runtime.config.host_memory:
            records(small.store, packed if format_id else open_blocks, format_id)
        if small.demotion.demote(np.asarray(packed), small.sizing.num_pages):
            small.flush()
        small.free(ids)
        small.flush()
    if small.store.on_gpu:
        torch.cuda.synchronize(small.store.device)


def small_runtime(runtime: Runtime) -> Runtime:
    """A runtime like `runtime` with a pool of BLOCKS blocks."""
    layout, block_formats, store = runtime.layout, runtime.store.block_formats, runtime.store
    reserve = max(r.pages for r in block_formats[1:]) * BLOCKS if len(block_formats) > 1 else 0
    pages = 1 + BLOCKS * layout.block_pages_bf16 + reserve
    # Kernels take the length of the ring, and are specialized on whether 16 divides it.
    pages += (store.ring.numel() - pages) % 16
    sizing = Sizing(
        pages * layout.page_bytes, pages, BLOCKS + 1, pages - 1 - BLOCKS * layout.block_pages_bf16,
        BLOCKS * layout.block_tokens,
    )  # fmt: skip
    small = PageStore.create(
        layout, block_formats, num_pages=pages, num_blocks=sizing.num_blocks, dtype=store.dtype, device=store.device
    )
    return Runtime(
        runtime.config, runtime.policy, layout, sizing, small, Ledger(sizing.num_blocks, sizing.chargeable_pages),
        Blocks(sizing.num_blocks),
    )  # fmt: skip


def one_shot(store: PageStore, ids: list[int]) -> None:
    """Pack the uncompressed blocks `ids` into one, like those of a one-shot prompt, and make them uncompressed
    again."""
    layout, blocks = store.layout, torch.tensor(ids, device=store.device)
    if why_unserved(layout, store.block_formats[1].high, windowed=False) is not None:
        return
    best = torch.arange(layout.block_tokens, dtype=torch.int32, device=store.device)
    pages = torch.ones((layout.layers, layout.heads), dtype=torch.int64, device=store.device)
    ops.pack_kept(store, blocks, 1, 1, best.expand(*pages.shape, -1).contiguous(), pages)
    ops.release(store, blocks[:1])
    ops.take_bf16(store, blocks)


def records(store: PageStore, ids: list[int], format_id: int) -> None:
    """Move the blocks `ids`, which are at `format_id`, out of the pool and back."""
    blocks = torch.tensor(ids, device=store.device)
    host = HostLayout.of(store.layout, store.block_formats, 0)
    stride = host.units_for(store.layout.block_pages_bf16) * host.unit_bytes
    buffer = torch.zeros((len(blocks), stride), dtype=torch.uint8, device=store.device)
    counts = store.counts[blocks].clone()
    ops.write_records(store, blocks, buffer)
    ops.release(store, blocks)
    ops.take_stored(store, blocks, format_id, counts)
    ops.read_records(store, blocks, buffer)


def _rows(attention: Attention, tokens: int, query_heads: int) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values in the layout of a model: slices of one product."""
    store = attention.store
    heads, dim = store.layout.heads, store.layout.head_dim
    qkv = torch.zeros((tokens, query_heads + 2 * heads, dim), dtype=store.dtype, device=store.device)
    return qkv.split((query_heads, heads, heads), 1)


def _row(packed: list[int], open_blocks: list[int], prefix: int, blocks: int) -> list[int]:
    """Block ids of a request: `prefix` packed blocks, then open ones; both lists repeat."""
    return [packed[j % len(packed)] if j < prefix else open_blocks[j % len(open_blocks)] for j in range(blocks)]


def decode(attention: Attention, packed: list[int], open_blocks: list[int], query_heads: int, layer: dict) -> None:
    """One step of two requests."""
    store, p = attention.store, attention.store.layout.block_tokens
    row = torch.tensor(_row(packed, open_blocks, 1, 2), dtype=torch.int32).repeat_interleave(p) * p
    table = (row + torch.arange(p, dtype=torch.int32).repeat(2)).repeat(2, 1).to(store.device)
    lens = torch.tensor([p + 1, 2 * p], device=store.device)
    snap = attention.plan_decode(table, torch.arange(2, device=store.device), lens, [p + 1, 2 * p])
    if attention.sampling is not None:
        attention.note(snap, None)
    attention.decode(0, *_rows(attention, 2, query_heads), **layer)


def prompts(
    attention: Attention, packed: list[int], open_blocks: list[int], query_heads: int, max_blocks: int, layer: dict
) -> None:
    """Prefills of all lengths that fit into `max_blocks` blocks, one at a time. If the history is fake-quantized, also
    those of a request with another quality, which sees its blocks exact."""
    p, group = attention.store.layout.block_tokens, query_heads // attention.store.layout.heads
    levels = (None, [None]) if attention.fake_quant_format is not None else (None,)
    lengths = sorted({2, *(-(-rows // group) for rows in ROWS), *NEW})
    # New tokens begin at a block boundary or one token before it, so that few tokens also fill a block.
    for new, before, cut, fake_quant_format in itertools.product(lengths, PREFIXES, (0, 1), levels):
        prefix_blocks = -(-before // p)
        prefix = max(0, prefix_blocks * p - cut)
        row = _row(packed, open_blocks, prefix // p, -(-(prefix + new) // p))
        if len(row) <= max_blocks:
            snap = _prompt(attention.store, row, prefix, new, fake_quant_format)
            attention.plan_extend(snap)
            if attention.sampling is not None:
                attention.note(snap, torch.tensor([new], dtype=torch.int32, device=attention.store.device))
                # A block that occurs twice in a row would have two concurrent writers of its scores.
                places = next((j for j, block in enumerate(row) if block in row[:j]), len(row))
                attention.scores.plan(snap.row_blocks, [0], [min(new, places * p)])
            attention.extend(0, *_rows(attention, new, query_heads), **layer)


def _prompt(store: PageStore, row: list[int], prefix: int, new: int, fake_quant_format: list | None) -> Snapshot:
    p, device = store.layout.block_tokens, store.device
    blocks, at = torch.tensor([row], dtype=torch.int32), torch.arange(prefix, prefix + new)
    return Snapshot(
        blocks.to(device), torch.tensor([prefix + new], device=device), blocks[0, at // p].long().to(device),
        (at % p).to(device), [prefix + new], [prefix], [new], fake_quant_format,
    )  # fmt: skip
