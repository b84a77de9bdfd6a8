"""The Hopper kernel for few new tokens, compiled for the host with matrix products written for this test: its outputs
match a float64 reading of the same pages. This checks the order of operands; races only show on a GPU."""

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
from tests.support.random_store import random_store

from .host_compiler import compiled, needs_compiler
from .test_interpret import error, inputs, reference

HERE = Path(__file__).parent
SCALE = 0.09


def build(store, group: int, rows: int, capped: bool, path: Path) -> ctypes.CDLL:
    op = ExtendAttention(store, query_heads=group * store.layout.heads, dense="none")
    assert extend.supports_few(op._classes)
    (path / "constants.h").write_text(extend.constants(store, group, op._classes, rows, capped))
    for source in [*SOURCES.iterdir(), HERE / "cuda_host" / "hopper.cuh", *(HERE / "cuda_host_few").iterdir()]:
        shutil.copy(source, path)
    return compiled(path, "-O2")


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    "spec, size, new, group, options",
    [  # size: of a page that holds this many tokens of this format
        ("k4v4", ("k4v4", 64), [16, 5], 4, {}),
        ("k4v4", ("k4v4", 48), [7, 8], 4, {}),
        ("k4v4", ("k4v4", 32), [16, 8], 4, {}),
        ("k8v4", ("k8v4", 16), [6, 8], 4, {}),
        ("k4v4", ("k4v4", 128), [5, 6], 5, dict(capped=True)),
        ("k8v8", ("k8v8", 64), [9, 16], 4, dict(dtype=torch.float16)),
        ("k8v4+k4v8", ("k8v4", 48), [12, 3], 3, {}),
        ("k8v4+k4v8", ("k4v4", 64), [64, 17], 1, {}),
        ("", ("k8v8", 32), [8, 16], 4, {}),
    ],
)
@pytest.mark.parametrize("scale", [SCALE, 1.5])  # the latter raises the maxima repeatedly
def test_output_matches_reference(spec, size, new, group, options, scale, tmp_path):
    formats = [FORMATS[n] for n in spec.split("+") if n]
    dtype, capped = options.get("dtype", torch.bfloat16), options.get("capped", False)
    heads, p, block_formats = 2, 128, (BlockFormat(BF16), *([BlockFormat(*formats)] if formats else []))
    page = page_bytes_for(FORMATS[size[0]], size[1], head_dim=128, has_scores=False)
    layout = PoolLayout(2, heads, 128, p, page)
    gen = torch.Generator().manual_seed(3)
    n = 8
    format_ids = torch.arange(n) % len(block_formats) if spec == "" else torch.tensor([1, 1, 0, 1, 1, 1, 1, 0])
    high = torch.randint(0, p + 1, (n, 2, heads), generator=gen)
    high[::2] = p
    low = (torch.rand(high.shape, generator=gen) * (p - high + 1)).long() if len(formats) == 2 else high * 0
    if len(formats) == 2:
        th, tl = (layout.page(f).tokens for f in formats)
        low = torch.minimum(low, (layout.head_pages_bf16 - -(-high // th)) * tl)
    store = random_store(layout, block_formats, format_ids, torch.stack((high, low), -1), dtype=dtype, seed=7)
    widest = max(new) * group
    rows = torch.tensor([[1, 2, 4, 5, 3, 8], [6, 7, 2, 8, 0, 0]], dtype=torch.int32)
    prefix = [5 * p + 77, 3 * p + 5]
    lib = build(store, group, min(t for t in extend.FEW_TIERS if t >= widest), capped, tmp_path)
    classes = ExtendAttention(store, query_heads=heads * group, dense="none")._plan.classes
    lists = torch.zeros((2, len(classes), 8), dtype=torch.int64)
    sizes = torch.zeros((2, len(classes)), dtype=torch.int32)
    for r in range(2):
        for j in range(-(-prefix[r] // p)):
            block = int(rows[r, j])
            stored = store.block_formats[int(store.format_id[block])]
            for c, (fmt, side) in enumerate(classes):
                if fmt == (stored.high, stored.low)[side]:
                    lists[r, c, sizes[r, c]] = block << 32 | min(p, prefix[r] - j * p)
                    sizes[r, c] += 1
    items = torch.tensor([(r, sum(new[:r]), 0, new[r] * group, 0, 7, 7, -1) for r in range(2)], dtype=torch.int32)
    q, k, v = inputs(store, group, sum(new), dtype)
    out = torch.full((sum(new), heads * group, 128), torch.nan, dtype=dtype)
    lse = torch.full(out.shape[:2], torch.nan)
    cap = 8.0 if capped else 0.0
    a = extend.Arguments(max_blocks=8, layer=1, factor=scale * 1.4426950408889634)
    if cap:
        a.inner, a.cap_factor = 2 * scale * 1.4426950408889634 / cap, cap * 1.4426950408889634
    tensors = dict(q=q, k=k, v=v, out=out, out_lse=lse, items=items, lists=lists, sizes=sizes, pages=store.pages)
    for name, x in (tensors | dict(table=store.table, counts=store.counts, headers=store.headers)).items():
        setattr(a, name, x.data_ptr())
    for name, x in dict(q=q, k=k, v=v).items():
        setattr(a, f"{name}_stride_n", x.stride(0) * 2)
        setattr(a, f"{name}_stride_h", x.stride(1) * 2)
    for program in range(2 * heads):
        assert lib.run(ctypes.byref(a), program, ctypes.c_uint64(program * 77 + 1)) == 0, "threads wait forever"
    want, sums = reference(store, 1, q, k, v, rows, prefix, new, scale=scale, logit_cap=cap, lse=True)
    print(error(out, want), float((lse - sums).abs().max()))
    assert error(out, want) < 0.02
    assert (lse - sums).abs().max() < 0.05
