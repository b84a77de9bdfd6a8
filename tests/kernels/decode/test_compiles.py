"""The Gluon decode kernel compiles for Hopper without a GPU, with SGLang imported, and fits in its registers."""

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import sglang.srt.server_args  # noqa: F401  (replaces functions of triton, as in a server)
import torch
import triton
from triton.backends.compiler import GPUTarget

from kvc_kernels.common.dependent_launch import LAUNCH
from kvc_kernels.decode import attention as decode
from kvc_kernels.formats import BF16, FORMATS
from kvc_kernels.layout import BlockFormat, PoolLayout, choose_page_bytes
from kvc_kernels.store import PageStore

TYPES = {
    "part_o": "*fp32", "part_ml": "*fp32", "scratch": "*i64", "items": "*i32",
    "column_ranges": "*i32", "lists": "*i64", "pages": "*u8", "table": "*i32", "counts": "*i16", "headers": "*fp16",
    "q_stride_b": "i32", "q_stride_h": "i32", "NB": "i32", "layer": "i32", "scale": "fp32", "cap": "fp32",
}  # fmt: skip


@pytest.mark.parametrize(
    "spec, heads, group, head_dim, dtype",
    [
        ("k8v4+k4v2", 8, 4, 128, "bf16"),
        ("k8v4+k4v2", 3, 3, 64, "bf16"),
        ("k4v4", 8, 4, 128, "bf16"),
        ("k4v4", 8, 4, 128, "fp16"),
        ("k4v2", 8, 8, 128, "bf16"),
    ],
)
def test_twelve_programs_fit_one_multiprocessor(spec, heads, group, head_dim, dtype, tmp_path):
    source = pytest.importorskip("triton.experimental.gluon._runtime").GluonASTSource
    formats = [FORMATS[n] for n in spec.split("+")]
    size = choose_page_bytes(formats, head_dim=head_dim, block_tokens=128, has_scores=True)
    layout = PoolLayout(2, heads, head_dim, 128, size, True)
    store = PageStore.create(
        layout, (BlockFormat(BF16), BlockFormat(*formats)), num_pages=4, num_blocks=2, device="cpu",
        dtype=torch.bfloat16 if dtype == "bf16" else torch.float16,
    )  # fmt: skip
    op = decode.DecodeAttention(
        store, max_batch=4, max_blocks=8, query_heads=heads * group, columns=2, tuning=decode.Tuning("gluon")
    )
    names = decode.gluon_kernel.arg_names
    chosen = op._constants(False)
    chosen |= LAUNCH
    constants = {(names.index(n),): v for n, v in chosen.items() if n in names}
    signature = {n: TYPES.get(n, "constexpr") for n in names} | {"q_ptr": f"*{dtype}"}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")}
    kernel = triton.compile(
        source(decode.gluon_kernel, signature, constants, aligned),
        target=GPUTarget("cuda", 90, 32), options={n: chosen[n] for n in ("num_warps", "maxnreg", "launch_pdl")},
    )  # fmt: skip
    assert kernel.asm["ptx"].count("griddepcontrol.wait") == 1
    assert 0 < kernel.metadata.shared <= 227 * 1024 // 12 - 1024
    ptx, ptxas = tmp_path / "kernel.ptx", Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    ptx.write_text(kernel.asm["ptx"])
    copies = re.findall(r"cp\.async\.c[ag]\.[^;]*;", kernel.asm["ptx"])
    wide = [c for c in copies if c.startswith("cp.async.cg.") and re.search(r"0x10, (0x10|%r\d+);", c)]
    # A row of 32 bytes (4-bit keys of head_dim 64) has 8 bytes for each of four lanes.
    assert wide and (head_dim == 64 or wide == copies) and not any("], 0x4," in c for c in copies)
    log = subprocess.run(
        [ptxas, "-v", "--gpu-name", "sm_90a", ptx, "-o", tmp_path / "out"], capture_output=True, text=True, check=True
    ).stderr
    assert int(re.search(r"(\d+) bytes spill stores", log)[1]) <= 16  # one or two words, outside the tile loops
    # Three warps per scheduler.
    assert int(re.search(r"Used (\d+) registers", log)[1]) <= decode.GLUON_REGISTERS


@pytest.mark.parametrize(
    "spec, group, head_dim, capability, window, engine",
    [
        ("k4v4", 4, 128, (9, 0), -1, "gluon"),
        ("k4v2", 8, 128, (9, 0), -1, "gluon"),
        ("k4v4", 4, 128, (8, 0), -1, "triton"),
        ("k4v4", 4, 64, (9, 0), -1, "triton"),
        ("k4v4", 16, 128, (9, 0), -1, "triton"),
        ("k8v4", 4, 128, (9, 0), -1, "triton"),
        ("k8v4+k4v2", 4, 128, (9, 0), -1, "gluon"),
        ("k4v4", 4, 128, (9, 0), 511, "triton"),
    ],
)
def test_gluon_kernel_serves_only_where_faster(spec, group, head_dim, capability, window, engine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    store = SimpleNamespace(
        block_formats=(BlockFormat(BF16), BlockFormat(*(FORMATS[n] for n in spec.split("+")))),
        device=torch.device("cuda"), layout=SimpleNamespace(head_dim=head_dim),
    )  # fmt: skip
    op = SimpleNamespace(tuning=decode.Tuning(), store=store, group=group, window=window, query_rows=0)
    assert decode.DecodeAttention._choose_engine(op) == engine
    op.query_rows = 8  # several queries per request
    assert decode.DecodeAttention._choose_engine(op) == "triton"
