"""The score kernels compile for Hopper without a GPU, and the one for decode steps fits in registers."""

import re
import subprocess
from pathlib import Path

import pytest
import sglang.srt.server_args  # noqa: F401  (replaces functions of triton, as in a server)
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, create_function_from_signature

from kvc_kernels.formats import BF16, FORMATS
from kvc_kernels.layout import BlockFormat, PoolLayout, choose_page_bytes
from kvc_kernels.scores import decode_kernel as step
from kvc_kernels.scores import prefill_kernel as prefill
from kvc_kernels.scores.prefill_kernel import AttentionScores
from kvc_kernels.scores.reference import ScoreSampling
from kvc_kernels.store import PageStore

TARGET = GPUTarget("cuda", 90, 32)
BACKEND = CUDABackend(TARGET)


def launch(spec, group, head_dim, tuning, monkeypatch, reduce="max", kernel=step._step_kernel):
    """The source and options with which a launch compiles the kernel."""
    formats = [FORMATS[n] for n in spec.split("+")]
    one_tier = len(formats) == 1
    size = choose_page_bytes(
        formats, head_dim=head_dim, block_tokens=128, has_scores=True, whole=one_tier
    )
    layout = PoolLayout(2, 8, head_dim, 128, size, True)
    store = PageStore.create(
        layout, (BlockFormat(BF16), BlockFormat(*formats)), num_pages=4, num_blocks=2, device="cpu",
        dtype=torch.bfloat16
    )
    sampling = ScoreSampling(reduce=reduce, alpha=0.01 if reduce == "recurrence" else 0.0)
    op = AttentionScores(
        store, query_heads=8 * group, sampling=sampling, max_batch=4, max_blocks=8, step=tuning
    )
    out = []

    def run(self, *args, grid, warmup, **options):
        bound, special, rest = create_function_from_signature(self.signature, self.params, BACKEND)(*args, **options)
        if self is kernel:
            options, signature, constants, attrs = self._pack_args(BACKEND, rest, bound, special, None)
            out.append((ASTSource(self, signature, constants, attrs), options.__dict__))

    monkeypatch.setattr(JITFunction, "run", run)
    rows = torch.zeros((4, 8), dtype=torch.int32)
    if kernel is step._step_kernel:
        op.plan_decode(rows, torch.ones(4, dtype=torch.int32))
    else:
        op.plan(rows, [0] * 4, [1] * 4)
    op.add(0, torch.zeros((4, 8 * group, head_dim), dtype=torch.bfloat16), torch.zeros((4, 8 * group)), scale=1.0)
    return out[0]


@pytest.mark.parametrize(
    "spec, group, head_dim, tuning, spilled, reduce",
    [
        ("k4v4", 4, 128, step.StepTuning(), 0, "max"),
        ("k4v4", 4, 128, step.StepTuning(), 0, "worst"),
        ("k4v4", 4, 128, step.StepTuning(), 0, "recurrence"),
        ("k4v2", 8, 128, step.StepTuning(), 0, "max"),
        ("k8v4+k4v2", 7, 64, step.StepTuning(), 0, "max"),
        ("k8v4+k4v2", 4, 128, step.StepTuning(), 32, "max"),
        ("k4v4", 4, 128, step.StepTuning(64, 2, 1, 12, 168), 0, "max"),
    ],
)
def test_launched_programs_fit_on_gpu(
    spec, group, head_dim, tuning, spilled, reduce, monkeypatch, tmp_path
):
    source, options = launch(spec, group, head_dim, tuning, monkeypatch, reduce)
    kernel = triton.compile(source, target=TARGET, options=options)
    assert tuning.programs * (kernel.metadata.shared + 1024) <= 227 * 1024
    ptx, ptxas = tmp_path / "kernel.ptx", Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    ptx.write_text(kernel.asm["ptx"])
    log = subprocess.run(
        [ptxas, "-v", "--gpu-name", "sm_90a", ptx, "-o", tmp_path / "out"], capture_output=True, text=True, check=True
    ).stderr
    assert int(re.search(r"(\d+) bytes spill stores", log)[1]) <= spilled
    # Each of a multiprocessor's four partitions has 16,384 registers, for whole warps.
    registers = -(-int(re.search(r"Used (\d+) registers", log)[1]) // 8) * 8 * 32
    assert 4 * (16384 // registers) >= tuning.programs * tuning.warps


@pytest.mark.parametrize("reduce", ["max", "worst", "recurrence"])
def test_prefill_scores_compile(reduce, monkeypatch):
    source, options = launch("k8v4+k4v2", 4, 128, None, monkeypatch, reduce, prefill._columns_kernel)
    assert "wgmma" in triton.compile(source, target=TARGET, options=options).asm["ptx"]
