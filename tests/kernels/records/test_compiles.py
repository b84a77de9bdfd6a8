"""The kernel that moves records compiles for Hopper without a GPU, with wide copies and few registers."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvc_kernels.decode.attention import GLUON_REGISTERS
from kvc_kernels.formats import BF16, FORMATS
from kvc_kernels.layout import BlockFormat, PoolLayout, choose_page_bytes
from kvc_kernels.records import kernel
from kvc_kernels.store import PageStore

ARRAYS = ("pages", "table", "format_id", "headers", "counts", "query_counts", "records")


@pytest.mark.parametrize("to_records", [False, True])
def test_mover_program_fits_where_decode_cta_fits(to_records, tmp_path, monkeypatch):
    """All CTAs of decode attention are resident at once. One CTA of the mover must not displace two of them."""
    size = choose_page_bytes([FORMATS["k4v4"]], head_dim=128, block_tokens=128, has_scores=False, whole=True)
    formats, launched = (BlockFormat(BF16), BlockFormat(FORMATS["k4v4"])), []
    layout = PoolLayout(2, 8, 128, 128, size)
    store = PageStore.create(layout, formats, num_pages=4, num_blocks=3, dtype=torch.bfloat16, device="cpu")
    blocks = torch.arange(2)

    class Launch:
        def __getitem__(self, grid):
            return lambda *args, **options: launched.append((grid, args, options))

    monkeypatch.setattr(kernel, "_copy_records_kernel", Launch())
    kernel._copy(store, blocks, torch.zeros((2, 1 << 20), dtype=torch.uint8), 0, to_records)
    monkeypatch.undo()
    ((grid, args, options),) = launched
    names = kernel._copy_records_kernel.arg_names
    assert grid == (32, 1, 1) and options == {"num_warps": 1}
    types = {torch.int8: "*i8", torch.int32: "*i32", torch.int64: "*i64"}
    signature = {
        n: types[v.dtype] if isinstance(v, torch.Tensor) else "constexpr" if n.isupper() else "i32"
        for n, v in zip(names, args, strict=True)
    }
    constants = {(i,): v for i, (n, v) in enumerate(zip(names, args)) if n.isupper()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in (*ARRAYS, "stride")}
    built = triton.compile(
        ASTSource(kernel._copy_records_kernel, signature, constants, aligned),
        target=GPUTarget("cuda", 90, 32), options={"num_warps": 1},
    )  # fmt: skip
    text = built.asm["ptx"]
    # Pages and key headers move 16 bytes at a time, and the remainder in smaller parts.
    assert kernel.CHUNK < size // 4 < 2 * kernel.CHUNK
    assert text.count("ld.global.v4.b32") == text.count("st.global.v4.b32") > kernel.CHUNK // 128
    assert built.metadata.shared == 0
    ptx, ptxas = tmp_path / "kernel.ptx", Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    ptx.write_text(text)
    log = subprocess.run(
        [ptxas, "-v", "--gpu-name", "sm_90a", ptx, "-o", tmp_path / "out"], capture_output=True, text=True, check=True
    ).stderr
    assert " 0 bytes spill stores" in log
    assert int(re.search(r"Used (\d+) registers", log)[1]) <= GLUON_REGISTERS
