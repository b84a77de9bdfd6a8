"""Stock prefill attention over a cached prefix in bf16 pages: FlashAttention 3 and FlashInfer."""

from __future__ import annotations

import math

import torch

STOCK = ("fa3 page 1", "fa3 page 128", "flashinfer fa2 page 16", "flashinfer fa3 page 1")
HEADS, GROUP, DIM = 8, 4, 128
SCALE = 1 / math.sqrt(DIM)


def new_rows(n: int, dim: int = DIM):
    qkv = torch.randn((n, (GROUP + 2) * HEADS, dim), device="cuda", dtype=torch.bfloat16)
    return qkv.split((GROUP * HEADS, HEADS, HEADS), 1)


def flashinfer_paged(backend: str, page: int, prefixes: list[int], new: list[int]):
    """Function that runs FlashInfer for new tokens over their prefixes, in bf16 pages in random order."""
    import flashinfer

    def starts(x):
        return torch.tensor([0, *x], dtype=torch.int32).cumsum(0, dtype=torch.int32)

    totals = [p + n for p, n in zip(prefixes, new)]
    pages = [-(-n // page) for n in totals]
    cache = torch.randn((sum(pages), 2, page, HEADS, DIM), device="cuda", dtype=torch.bfloat16)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), "NHD", backend=backend
    )
    wrapper.plan(
        starts(new),
        starts(pages),
        torch.randperm(sum(pages), device="cuda").int(),
        torch.tensor([(n - 1) % page + 1 for n in totals], dtype=torch.int32),
        HEADS * GROUP, HEADS, DIM, page, causal=True, sm_scale=SCALE, q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )  # fmt: skip
    q = new_rows(sum(new))[0].contiguous()
    return lambda: wrapper.run(q, cache)


def fa3_paged(page: int, prefixes: list[int], new: list[int], dim: int = DIM):
    """Function that runs FlashAttention 3 in the same way, as SGLang's `fa3` backend calls it."""
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    totals = [p + n for p, n in zip(prefixes, new)]
    pages = [-(-n // page) for n in totals]
    k, v = torch.randn((2, sum(pages), page, HEADS, dim), device="cuda", dtype=torch.bfloat16)
    table = torch.zeros((len(new), max(pages)), dtype=torch.int32, device="cuda")
    for row, ids in zip(table, torch.randperm(sum(pages), device="cuda").int().split(pages)):
        row[: len(ids)] = ids
    q = new_rows(sum(new), dim)[0].contiguous()
    starts = torch.tensor([0, *new], device="cuda").cumsum(0).int()
    lens = torch.tensor(totals, dtype=torch.int32, device="cuda")
    lengths = dict(cache_seqlens=lens, cu_seqlens_q=starts, max_seqlen_q=max(new))
    return lambda: flash_attn_with_kvcache(q, k, v, page_table=table, **lengths, softmax_scale=dim**-0.5, causal=True)


def stock(name: str, prefixes: list[int], new: list[int]):
    """Function that runs the stock kernel `name`, one of `STOCK`."""
    library, *form = name.split()
    page = int(form[-1])
    return fa3_paged(page, prefixes, new) if library == "fa3" else flashinfer_paged(form[0], page, prefixes, new)
