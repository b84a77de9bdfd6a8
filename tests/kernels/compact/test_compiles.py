"""The kernel that packs kept tokens compiles for Hopper without a GPU and keeps its values in registers."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvc_kernels.compact import kept_kernel
from kvc_kernels.formats import BF16, FORMATS
from kvc_kernels.layout import BlockFormat, PoolLayout, choose_page_bytes
from kvc_kernels.store import PageStore

ARRAYS = ("pages", "out", "row_table", "tokens", "counts", "ids", "headers", "like")
TYPES = {torch.uint8: "*u8", torch.int32: "*i32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["k4v4", "k8v4", "k4v2"])
def test_kept_tokens_are_packed_without_spills(spec, tmp_path, monkeypatch):
    fmt, launched = FORMATS[spec], []
    size = choose_page_bytes([fmt], head_dim=128, block_tokens=128, has_scores=False, whole=True)
    layout = PoolLayout(1, 2, 128, 128, size)
    store = PageStore.create(
        layout, (BlockFormat(BF16), BlockFormat(fmt)), num_pages=4, num_blocks=3, dtype=torch.bfloat16, device="cpu"
    )

    class Launch:
        def __getitem__(self, grid):
            return lambda *args, **options: launched.append((grid, args, options))

    monkeypatch.setattr(kept_kernel, "kept_kernel", Launch())
    ids, counts = torch.zeros((4, 2, layout.head_pages_bf16), dtype=torch.int32), torch.zeros((2, 3), dtype=torch.int64)
    kept_kernel.encode_kept_triton(store, layout.page(fmt), ids, torch.zeros((2, 3 * 128)).int(), counts)
    monkeypatch.undo()
    ((grid, args, options),) = launched
    kernel = kept_kernel.kept_kernel
    assert grid == (12,) and options == {"num_warps": 4}
    constants = {p.name: args[p.num] for p in kernel.params if p.is_constexpr}
    signature = {
        n: "constexpr" if n in constants else TYPES[v.dtype] if isinstance(v, torch.Tensor) else "i32"
        for n, v in zip(kernel.arg_names, args, strict=True)
    }
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names) if n in ARRAYS}
    built = triton.compile(
        ASTSource(kernel, signature, constants, aligned), target=GPUTarget("cuda", 90, 32), options=options
    )
    ptx, ptxas = tmp_path / "kernel.ptx", Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    ptx.write_text(built.asm["ptx"])
    command = [ptxas, "-v", "--gpu-name", "sm_90a", ptx, "-o", tmp_path / "kernel.cubin"]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in report
    assert int(re.search(r"Used (\d+) registers", report)[1]) <= 168  # three CTAs of an SM
