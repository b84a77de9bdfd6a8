"""The Hopper extend kernel's unpacking warpgroups, compiled for the host: their tiles match a float64 reading of the
same pages. Only the matrix products and the softmax that follow need tests on a GPU."""

import ctypes
import shutil
from pathlib import Path

import pytest
import torch

from kvc_kernels.common.nvrtc import SOURCES
from kvc_kernels.extend import hopper as extend
from kvc_kernels.extend.attention import ExtendAttention
from kvc_kernels.formats import BF16, FORMATS
from kvc_kernels.layout import BlockFormat, PoolLayout, page_bytes_for
from tests.support.random_store import dense_head, random_store

from .host_compiler import compiled, needs_compiler

HERE = Path(__file__).parent / "cuda_host"
FORMAT_LISTS = {
    "all": ("k4v4", "k8v8", ("k8v4", "k4v2"), "k4v8", "k2v2"),
    "tiers": (("k4v4", "k2v2"), ("k8v8", "k4v4")),
    "k4v4": ("k4v4",),
    "plain": (),
}
GROUP, NEW = 3, 150


def build(store: extend.PageStore, rows: int, path: Path) -> ctypes.CDLL:
    op = ExtendAttention(store, query_heads=GROUP * store.layout.heads, dense="none")
    (path / "constants.h").write_text(extend.constants(store, GROUP, op._classes, rows, False))
    for name in ("extend.cu", "extend_arguments.cuh", "extend_tiles.cuh", "unpack.cuh"):
        shutil.copy(SOURCES / name, path)
    for source in HERE.iterdir():
        shutil.copy(source, path)
    return compiled(path, "-O1")


def tokens_of(store, classes, c: int, block: int, head: int, tokens: int):
    """Keys and values of class c of a block in layer 1."""
    k, v = dense_head(store, block, 1, head, tokens)
    if c == 0:
        return k, v
    high = int(store.counts[block, 1, head, 0])
    return (k[high:], v[high:]) if classes[c][1] else (k[:high], v[:high])


@needs_compiler
@pytest.mark.parametrize(
    "spec, size, block_tokens, rows, dtype",
    [  # size: of a page that holds this many tokens of this format
        ("all", ("k4v4", 64), 128, 256, torch.bfloat16),
        ("all", ("k8v8", 64), 256, 256, torch.float16),
        ("all", ("k2v2", 64), 128, 256, torch.bfloat16),
        ("all", ("k8v4", 128), 384, 128, torch.bfloat16),
        ("all", ("k4v4", 48), 192, 128, torch.float16),
        ("tiers", ("k2v2", 128), 128, 256, torch.bfloat16),
        ("k4v4", ("k4v4", 64), 128, 128, torch.float16),
        ("plain", ("k8v8", 16), 128, 256, torch.bfloat16),
    ],
)
def test_unpacked_tiles_match_reference(spec, size, block_tokens, rows, dtype, tmp_path):
    block_formats = [BlockFormat(*(FORMATS[n] for n in ([r] if isinstance(r, str) else r))) for r in FORMAT_LISTS[spec]]
    heads, p, block_formats = 2, block_tokens, (BlockFormat(BF16), *block_formats)
    page = page_bytes_for(FORMATS[size[0]], size[1], head_dim=128, has_scores=False)
    layout = PoolLayout(2, heads, 128, p, page)
    assert size[0] not in FORMAT_LISTS[spec] or layout.page(FORMATS[size[0]]).tokens == size[1]
    gen = torch.Generator().manual_seed(5)
    n = 9 * len(block_formats) if len(block_formats) < 4 else 5 * len(block_formats)
    if spec == "k4v4":
        n = 40  # more blocks per class than are listed at a time
    of = torch.arange(n) % len(block_formats)
    high = torch.randint(0, p + 1, (n, 2, heads), generator=gen)
    high[torch.arange(n) // len(block_formats) % 3 == 1] = p  # whole blocks, and some without any tokens
    high[-1] = 0
    t = torch.tensor([layout.page(r.low).tokens if r.low else 1 for r in block_formats])[of].view(-1, 1, 1)
    th = torch.tensor([layout.page(r.high).tokens for r in block_formats])[of].view(-1, 1, 1)
    room = (layout.head_pages_bf16 - -(-high // th)) * t  # tokens in pages that the high tier leaves
    low = torch.minimum((torch.rand(high.shape, generator=gen) * (p - high + 1)).long(), room)
    low[torch.tensor([r.low is None for r in block_formats])[of]] = 0
    store = random_store(layout, block_formats, of, torch.stack((high, low), -1), dtype=dtype, seed=7)
    lib = build(store, rows, tmp_path)
    classes = ExtendAttention(store, query_heads=heads, dense="none")._plan.classes

    # Two requests over all blocks, each in its own order; the last uncompressed block is part-filled.
    requests = [(1 + torch.randperm(n, generator=gen)).tolist() for _ in range(2)]
    lists = torch.zeros((2, len(classes), n), dtype=torch.int64)
    blocks = {}
    for r, order in enumerate(requests):
        for c, (fmt, side) in enumerate(classes):
            class_blocks = [b for b in order if fmt == (getattr(block_formats[of[b - 1]], ("high", "low")[side]))]
            class_blocks = [b for b in class_blocks if of[b - 1] or c == 0]
            blocks[r, c] = [(b, p - 37 * (c == 0 and i == len(class_blocks) - 1)) for i, b in enumerate(class_blocks)]
            lists[r, c, : len(class_blocks)] = torch.tensor([b << 32 | t for b, t in blocks[r, c]])
    sizes = torch.tensor([[len(blocks[r, c]) for c in range(len(classes))] for r in range(2)], dtype=torch.int32)
    # request, first query, first row, end row, from, to, of, slot
    cuts = [(4, 9, 10, 0), (0, 4, 10, 1), (9, 10, 10, 2)]
    items = [(0, 0, 0, NEW * GROUP, 0, 7, 7, -1), *((1, NEW, rows, NEW * GROUP, *cut) for cut in cuts)]
    items_of = torch.tensor(items, dtype=torch.int32)
    k, v = torch.randn((2 * NEW, heads + 1, 256), generator=gen).to(dtype)[:, :heads].split(128, 2)
    a = extend.Arguments(max_blocks=n, layer=1)
    tensors = dict(k=k, v=v, items=items_of, lists=lists, sizes=sizes, pages=store.pages, table=store.table)
    for name, x in (tensors | dict(counts=store.counts, headers=store.headers)).items():
        setattr(a, name, x.data_ptr())
    a.k_stride_n, a.k_stride_h, a.v_stride_n, a.v_stride_h = (2 * s for x in (k, v) for s in x.stride()[:2])

    max_tiles, seen = 1000, {}
    out = torch.zeros((max_tiles, lib.tile_bytes()), dtype=torch.uint8)
    for program in range(len(items) * heads):
        r, start, first, end, *share, of, _ = items[program // heads]
        head = program % heads
        num_tiles = lib.run(
            ctypes.byref(a), program, ctypes.c_void_p(out.data_ptr()), max_tiles, ctypes.c_uint64(program * 77)
        )
        assert num_tiles >= 0, "threads wait for each other forever"
        own_tokens = -(-min(first + rows, end) // GROUP)
        expected = []  # keys, values and first new token of each run of tiles
        if share[0] == 0:
            x, y = (z[start : start + own_tokens, head].double() for z in (k, v))
            expected += [(x[i : i + 64], y[i : i + 64], i) for i in range(0, own_tokens, 64)]
        for c in range(len(classes)):
            more = -(-own_tokens // p) if c == len(classes) - 1 else 0
            size = len(blocks[r, c])
            cut = [max((size + more) * x // of, more) - more for x in share]
            seen.setdefault((r, head, c), []).extend(range(*cut))
            expected += [(*tokens_of(store, classes, c, b, head, t), None) for b, t in blocks[r, c][slice(*cut)]]
        at = 0
        for keys, values, token in expected:
            for i in range(0, len(keys), 64):
                live = min(64, len(keys) - i)
                x = out[at]
                at += 1
                assert x[:8].view(torch.int32).tolist() == [live, -1 if token is None else token]
                tile = x[8:].view(torch.float16).double()
                kk, vv = tile[: 64 * 128].view(64, 128), tile[64 * 128 :].view(128, 64).T
                torch.testing.assert_close(kk[:live], keys[i : i + live], rtol=0.002, atol=0.006)
                torch.testing.assert_close(vv[:live], values[i : i + live], rtol=0.002, atol=0.003)
                assert not vv[live:].any()  # because a probability of 0 times NaN is NaN
        assert at == num_tiles
    for (r, _, c), places in seen.items():  # the parts of an item cover every block once
        assert sorted(places) == list(range(len(blocks[r, c])))
