"""Random cases for decode attention, for the interpreter and for the GPU."""

import torch

from kvc_kernels.formats import BF16, FORMATS
from kvc_kernels.layout import BlockFormat, PoolLayout, choose_page_bytes
from tests.support.random_store import random_store, reference_decode


def block_formats_of(*names: str) -> tuple[BlockFormat, ...]:
    """`block_formats_of("k4v4", "k8v4+k4v2")`: bf16, then one format per name."""
    formats = [[FORMATS[x] for x in n.split("+")] for n in names]
    return (BlockFormat(BF16), *(BlockFormat(f[0], f[1] if len(f) > 1 else None) for f in formats))


def make_case(
    *names: str,
    lens=(193, 1, 128),
    heads: int = 2,
    group: int = 4,
    head_dim: int = 64,
    block_tokens: int = 64,
    page_bytes: int = 0,
    has_scores: bool = False,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    keep_all: bool = False,
):
    """(store of 2 layers, q `[B, Hq, D]`, row_blocks int32 `[B, NB]`, seq_lens int32 `[B]`).

    Block formats are drawn at random (a block in progress is bf16); heads are ragged, from empty to full, head 0 of the
    first request stores nothing where all its blocks are packed. With `keep_all`, all heads keep every token, and some
    blocks are bf16. The last row is padding: length 1, block 0.
    """
    block_formats = block_formats_of(*names)
    formats = [f for r in block_formats[1:] for f in (r.high, r.low) if f is not None]
    size = page_bytes or choose_page_bytes(
        formats, head_dim=head_dim, block_tokens=block_tokens, has_scores=has_scores
    )
    layout = PoolLayout(2, heads, head_dim, block_tokens, size, has_scores)
    gen = torch.Generator().manual_seed(seed)
    nb = max(-(-n // block_tokens) for n in lens)
    n = len(lens) * nb
    format_ids = torch.randint(0, len(block_formats), (n,), generator=gen)
    if names and not keep_all:
        format_ids[format_ids == 0] = torch.randint(0, len(block_formats), ((format_ids == 0).sum(),), generator=gen)
    rows = 1 + torch.randperm(n, generator=gen).view(len(lens), nb)
    for row, length in zip(rows, lens):
        if length % block_tokens:
            format_ids[row[length // block_tokens] - 1] = 0
    high = torch.randint(0, block_tokens + 1, (n, 2, heads), generator=gen)
    two = torch.tensor([r.low is not None for r in block_formats])[format_ids].view(-1, 1, 1)
    low = torch.where(two, (torch.rand(high.shape, generator=gen) * (block_tokens - high + 1)).long(), 0)
    counts = torch.stack((high, low), -1)
    counts[rows[0] - 1, :, 0] = 0
    counts[rows[-1, 0] - 1] = torch.tensor([block_tokens, 0])
    if keep_all:
        counts[:] = torch.tensor([block_tokens, 0])
    store = random_store(layout, block_formats, format_ids, counts, dtype=dtype, device=device, seed=seed)
    rows = torch.cat((rows, torch.zeros((1, nb), dtype=rows.dtype))).int().to(device)
    seq_lens = torch.tensor([*lens, 1], dtype=torch.int32, device=device)
    # Twice the usual size spreads logits over several units, so that the running maximum is rescaled.
    q = 2 * torch.randn((len(lens) + 1, heads * group, head_dim), generator=gen)
    return store, q.to(dtype).to(device), rows, seq_lens


def relative_error(out, store, layer, q, rows, seq_lens, *, scale, logit_cap=0.0, window=-1) -> float:
    """Relative error against float64; NaN if `out` contains NaN."""
    ref = reference_decode(store, layer, q, rows, seq_lens, scale=scale, logit_cap=logit_cap, window=window)
    return ((out.double().cpu() - ref).norm() / ref.norm()).item()
