"""Random page stores and a float64 reader for them, used by kernel tests and benchmarks.

The reader is written from the layout's documentation alone, independently of the operations, so that it can check them.
"""

from __future__ import annotations

import torch

from kvc_kernels.formats import BF16, Format
from kvc_kernels.layout import BlockFormat, PoolLayout
from kvc_kernels.store import PageStore


def random_store(
    layout: PoolLayout,
    block_formats: tuple[BlockFormat, ...],
    format_ids: torch.Tensor,
    counts: torch.Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
    spare_pages: int = 3,
) -> PageStore:
    """A store whose blocks 1..n hold random tokens; block 0 stays the scratch block.

    `format_ids[n]` index into `block_formats`, `counts[n, L, H, 2]` tokens high and low of packed blocks. Page ids are
    a random permutation, codes are random bytes, table entries that no token uses are page 0, and bytes after the
    tokens of the last page stay random bytes (they may spell NaN), as after reuse.
    """
    gen = torch.Generator(device=device).manual_seed(seed)
    format_ids, counts = format_ids.to(device), counts.to(device)
    n, e = len(format_ids), layout.head_pages_bf16
    entry = torch.arange(e, device=device)
    high, low = _page_counts(layout, block_formats, format_ids, counts)
    if int((high + low).max()) > e:
        raise ValueError("a head needs more pages than its table row has entries")
    is_high = entry < high.unsqueeze(-1)
    is_low = entry >= e - low.unsqueeze(-1)
    used = is_high | is_low
    total = int(used.sum())
    num_pages = total + 1 + spare_pages
    store = PageStore.create(layout, block_formats, num_pages=num_pages, num_blocks=n + 1, dtype=dtype, device=device)
    store.format_id[1:] = format_ids.to(torch.int8)
    store.counts[1:] = counts.to(torch.int16)
    ids = 1 + torch.randperm(num_pages - 1, generator=gen, device=device)[:total]
    table = torch.zeros(used.shape, dtype=torch.int32, device=device)
    table[used] = ids.int()
    store.table[1:] = table
    store.cursor[0] = total
    _random_bytes(store.pages, gen)
    _fill_plain(store, torch.zeros(1, dtype=torch.long, device=device), gen)
    for r, block_format in enumerate(block_formats):
        of_format = (format_ids == r).view(n, 1, 1, 1)
        if r == 0:
            _fill_plain(store, table[is_high & of_format].long(), gen)
            continue
        _fill_meta(store, block_format.high, table[is_high & of_format].long(), gen)
        if block_format.low is not None:
            _fill_meta(store, block_format.low, table[is_low & of_format].long(), gen)
    shape = store.headers[:, :, :, 0].shape
    scale = 0.004 + 0.02 * torch.rand(shape, generator=gen, device=device)
    offset = torch.randn((1, *shape[1:]), generator=gen, device=device)  # a key bias, as real models have
    store.headers[:, :, :, 0] = scale.half()
    store.headers[:, :, :, 1] = (offset - scale * 127.5).half()
    return store


def _page_counts(layout: PoolLayout, block_formats, format_ids: torch.Tensor, counts: torch.Tensor):
    """int64 `[n, L, H]` pages at the left and at the right end of each head's table row."""
    high = torch.full(counts.shape[:3], layout.head_pages_bf16, dtype=torch.int64, device=counts.device)
    low = torch.zeros_like(high)
    for r, block_format in enumerate(block_formats[1:], 1):
        of_format = (format_ids == r).view(-1, 1, 1)
        t = layout.page(block_format.high).tokens
        high = torch.where(of_format, (counts[..., 0].long() + t - 1) // t, high)
        if block_format.low is not None:
            t = layout.page(block_format.low).tokens
            low = torch.where(of_format, (counts[..., 1].long() + t - 1) // t, low)
    return high, low


def _random_bytes(pages: torch.Tensor, gen: torch.Generator) -> None:
    """Fill in slices, because the generator's int64 intermediate of a whole pool would not fit next to it."""
    flat = pages.view(-1)
    for at in range(0, flat.numel(), 1 << 28):
        part = flat[at : at + (1 << 28)]
        part.random_(0, 256, generator=gen)


def _fill_plain(store: PageStore, ids: torch.Tensor, gen: torch.Generator) -> None:
    page = store.layout.page(BF16)
    elements = page.tokens * page.head_dim * 2
    for chunk in ids.split(1 << 15):
        x = torch.randn((len(chunk), elements), generator=gen, device=store.device).to(store.dtype)
        store.pages[chunk, : 2 * elements] = x.view(torch.uint8)


def _fill_meta(store: PageStore, fmt: Format, ids: torch.Tensor, gen: torch.Generator) -> None:
    """Per-token scales and zeros such that a dequantized element spans about -2..2, with tokens of different size."""
    if not ids.numel():
        return
    page = store.layout.page(fmt)
    at, size = page.segments["value_meta"]
    for chunk in ids.split(1 << 16):
        shape = (len(chunk), page.value_groups, 1, page.tokens)
        span = 1 + 3 * torch.rand(shape, generator=gen, device=store.device)
        shift = 0.3 * torch.randn(shape, generator=gen, device=store.device)
        meta = torch.cat((span / ((1 << fmt.value_bits) - 1), shift - span / 2), 2).half()
        store.pages[chunk, at : at + size] = meta.view(len(chunk), -1).view(torch.uint8)


def dense_head(store: PageStore, block: int, layer: int, head: int, tokens: int):
    """float64 k `[n, D]` and v `[n, D]` of what one head of a block stores; `tokens` counts for bf16 blocks."""
    r = int(store.format_id[block])
    row = store.table[block, layer, head].tolist()
    if r == 0:
        return _read(store, BF16, row, tokens, None)
    block_format = store.block_formats[r]
    n_high, n_low = store.counts[block, layer, head].tolist()
    header = store.headers[block, layer, head].double()
    k, v = _read(store, block_format.high, row, n_high, header)
    if block_format.low is not None:
        k2, v2 = _read(store, block_format.low, row[::-1], n_low, header)
        k, v = torch.cat((k, k2)), torch.cat((v, v2))
    return k, v


def _read(store: PageStore, fmt: Format, row: list[int], n: int, header: torch.Tensor | None):
    page = store.layout.page(fmt)
    d, t = page.head_dim, page.tokens
    keys, values = [torch.zeros((0, d), dtype=torch.float64)], [torch.zeros((0, d), dtype=torch.float64)]

    def segment(raw: torch.Tensor, name: str) -> torch.Tensor:
        at, size = page.segments[name]
        return raw[at : at + size].clone()

    for i in range(-(-n // t)):
        raw = store.pages[row[i]].cpu()
        count = min(t, n - i * t)
        kc, vc = segment(raw, "key_codes"), segment(raw, "value_codes")
        if not fmt.packed:
            keys.append(kc.view(store.dtype).view(t, d)[:count].double())
            values.append(vc.view(store.dtype).view(t, d)[:count].double())
            continue
        k = _unpack(kc.view(t, -1), fmt.key_bits)
        scale = header[0].cpu() * (255 // ((1 << fmt.key_bits) - 1))
        k = k * scale + header[1].cpu()
        v = _unpack(vc.view(-1, t).T, fmt.value_bits)
        meta = segment(raw, "value_meta").view(torch.float16).view(page.value_groups, 2, t).double()
        parts = v.view(t, page.value_groups, -1)
        v = (parts * meta[:, 0].T[:, :, None] + meta[:, 1].T[:, :, None]).view(t, d)
        keys.append(k[:count])
        values.append(v[:count])
    return torch.cat(keys), torch.cat(values)


def _unpack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 `[T, D*bits/8]` -> float64 `[T, D]`: field j of byte c is feature j * D*bits/8 + c."""
    mask = (1 << bits) - 1
    return torch.cat([(codes.int() >> (bits * j)) & mask for j in range(8 // bits)], 1).double()


def reference_decode(
    store: PageStore,
    layer: int,
    q: torch.Tensor,
    row_blocks: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    logit_cap: float = 0.0,
    window: int = -1,
) -> torch.Tensor:
    """float64 `[B, Hq, D]` on the CPU; a head that stores nothing gives 0. A `window` requires blocks that keep all
    tokens."""
    layout, p = store.layout, store.layout.block_tokens
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[1] // layout.heads
    for b in range(q.shape[0]):
        n = int(seq_lens[b])
        for h in range(layout.heads):
            parts = [
                dense_head(store, int(row_blocks[b, j]), layer, h, min(p, n - j * p)) for j in range(-(-n // p))
            ]
            if not parts:
                continue
            k, v = torch.cat([x[0] for x in parts]), torch.cat([x[1] for x in parts])
            if not len(k):
                continue
            if window >= 0:
                k, v = k[-window - 1 :], v[-window - 1 :]
            heads = slice(h * group, (h + 1) * group)
            logits = q[b, heads].double().cpu() @ k.T * scale
            if logit_cap > 0:
                logits = logit_cap * torch.tanh(logits / logit_cap)
            out[b, heads] = torch.softmax(logits, -1) @ v
    return out
