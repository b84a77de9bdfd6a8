"""Attention with sliding windows in plain torch, against float64 over the stored rows."""

import pytest
import torch

from kvc_kernels import ops
from kvc_kernels.extend.fake_quant import fake_quantize
from tests.support.pages import block_formats_of, fill, make_store, random_kv

P, HEADS, DIM = 32, 2, 64
# Prefixes that end inside a block and at borders, one shorter than every window; blocks that wait to be packed, one
# after packed ones; one block, two and more; a request without new tokens.
PREFIX, NEW = [45, 128, 0, 10, 96], [60, 40, 33, 5, 0]
WAITING = [[], [1, 3], [], [], [1]]
ROWS = torch.tensor(
    [[3, 1, 4, 12, 0, 0], [2, 5, 6, 9, 11, 16], [7, 8, 0, 0, 0, 0], [10, 0, 0, 0, 0, 0], [13, 14, 15, 0, 0, 0]],
    dtype=torch.int32,
)
WINDOWS = [0, 1, 20, 31, 32, 50, 70, 1000]


def request_case(spec="k4v4", dtype=torch.bfloat16, heads=HEADS, dim=DIM, times=1):
    """A store of two layers that holds all tokens; all lengths, including the block size, are multiplied by `times`."""
    p = times * P
    packed_as = block_formats_of(spec) if spec else block_formats_of()
    store = make_store(
        packed_as, layers=2, heads=heads, head_dim=dim, block_tokens=p, blocks=18, dtype=dtype
    )
    for r, (prefix, new) in enumerate(zip(PREFIX, NEW)):
        tokens = times * (prefix + new)
        blocks = ROWS[r, : -(-tokens // p)].long()
        k, v = random_kv(store, tokens, seed=r)
        fill(store, blocks, k, v)
        full = [int(ROWS[r, j]) for j in range(times * prefix // p) if j not in WAITING[r]]
        if spec and full:
            ids = torch.tensor(full)
            ops.compact(store, ids, 1, ops.keep_all(len(full), store.layout), from_format=0)
    return store


def queries(group, dtype=torch.bfloat16, heads=HEADS, dim=DIM, times=1):
    shape = (times * sum(NEW), heads * group, dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(dtype)


def reference(store, layer, q, rows, prefix, new, *, window, scale, cap=0.0, fake_quant_format=None):
    """float64 `[N, Hq, D]`, block by block of queries; `fake_quant_format[B]` as in `ops.extend_attention`."""
    g, out, at = store.layout, [], 0
    p, group = g.block_tokens, q.shape[1] // g.heads
    for r, n in enumerate(new):
        blocks = rows[r, : -(-(prefix[r] + n) // p)].long()
        k, v, tier = ops.load_dense(store, layer, blocks)
        assert not n or bool((tier == 2).all())
        fmt = fake_quant_format[r] if fake_quant_format else None
        later = k, v
        if fmt is not None:
            plain = (store.format_id[blocks] == 0).view(-1, 1, 1, 1)
            again = fake_quantize(g, fmt, k.to(store.dtype), v.to(store.dtype))
            later = [torch.where(plain, x.float(), y) for x, y in zip(again, (k, v))]
        for block in range(prefix[r] // p, len(blocks) if n else 0):
            position = torch.arange(max(prefix[r], block * p), min(prefix[r] + n, block * p + p))
            x = [torch.cat((a[:block], b[block : block + 1])) for a, b in zip(later, (k, v))]
            keys, values = (y.transpose(0, 1).flatten(1, 2).double() for y in x)
            block_q = q[at : at + len(position)].double().unflatten(1, (g.heads, group))
            logits = torch.einsum("nhgd,hsd->hgns", block_q, keys) * scale
            if cap:
                logits = cap * torch.tanh(logits / cap)
            behind = position[:, None] - torch.arange(keys.shape[1])
            logits = logits.masked_fill((behind < 0) | (behind > window), -torch.inf)
            # A slot after the last token may hold anything, and NaN times 0 is NaN.
            values[:, int(position[-1]) + 1 :] = 0
            out.append(torch.einsum("hgns,hsd->nhgd", logits.softmax(-1), values).flatten(1, 2))
            at += len(position)
    return torch.cat(out)


def error(out, ref):
    """Worst row, over that row's norm or the mean norm where that is larger."""
    norm = ref.norm(dim=-1)
    return float(((out.double().cpu() - ref).norm(dim=-1) / norm.clamp(min=norm.mean())).max())


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("cap", [0.0, 20.0])
def test_extend(window, stored, cap):
    store, q = request_case(), queries(3)
    fmt = store.block_formats[1].high
    seen = [fmt, fmt, None, fmt, fmt] if stored else None
    got = ops.extend_attention(
        store, 1, q, ROWS, PREFIX, NEW, scale=0.125, logit_cap=cap, window=window, fake_quant_format=seen
    )
    want = reference(store, 1, q, ROWS, PREFIX, NEW, window=window, scale=0.125, cap=cap, fake_quant_format=seen)
    assert error(got, want) < 0.02


@pytest.mark.parametrize("spec", ["", "k4v4", "k8v4", "k2v2"])
@pytest.mark.parametrize("window", WINDOWS)
def test_decode(spec, window):
    """The cases include the last token of a whole block and a window that ends just before a block."""
    store, scale = request_case(spec), 0.125
    for drop in (0, 5):
        lens = [a + b - drop for a, b in zip(PREFIX, NEW)]
        q = queries(2)[: len(lens)]
        got = ops.decode_attention(store, 0, q, ROWS, torch.tensor(lens), scale=scale, window=window)
        want = reference(
            store, 0, q, ROWS, [n - 1 for n in lens], [1] * len(lens), window=window, scale=scale
        )
        assert error(got, want) < 0.02


def test_window_over_all_tokens_changes_nothing():
    store, q = request_case(), queries(2)
    args, seen = (store, 0, q, ROWS, PREFIX, NEW), [store.block_formats[1].high] * len(NEW)
    for fake_quant_format in (None, seen):
        want = ops.extend_attention(*args, scale=0.125, fake_quant_format=fake_quant_format)
        got = ops.extend_attention(*args, scale=0.125, fake_quant_format=fake_quant_format, window=500)
        assert error(got, want.double()) < 0.01


def test_blocks_before_window_are_not_read():
    """NaN in blocks that no query sees changes nothing."""
    store, q = request_case(""), queries(1)
    want = ops.extend_attention(store, 0, q, ROWS, PREFIX, NEW, scale=0.125, window=40)
    store.pages[store.table[int(ROWS[1, 0])].long().flatten()] = 255
    got = ops.extend_attention(store, 0, q, ROWS, PREFIX, NEW, scale=0.125, window=40)
    assert torch.equal(got, want)
    lens = torch.tensor([a + b for a, b in zip(PREFIX, NEW)])
    assert ops.decode_attention(store, 0, q[:5], ROWS, lens, scale=0.125, window=100).isfinite().all()
