"""The portable extend kernel, compiled without a GPU, fits into the shared memory of GPUs with 99 KB."""

import pytest
import sglang.srt.server_args  # noqa: F401  (replaces functions of triton, as in a server)
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, create_function_from_signature

from kvc_kernels.extend import attention as extend
from kvc_kernels.layout import PoolLayout, choose_page_bytes
from kvc_kernels.store import PageStore
from tests.support.decode import block_formats_of

TARGET = GPUTarget("cuda", 89, 32)
BACKEND = CUDABackend(TARGET)
SHARED = 99 * 1024


def shared_memory(fmt: str, head_dim: int, tuning: extend.Tuning, monkeypatch) -> int:
    """Bytes of shared memory that a program of `_extend_kernel` takes."""
    block_formats, compiled = block_formats_of(fmt), []

    def run(self, *args, grid, warmup, **options):
        if self is extend._extend_kernel:
            bound, special, rest = create_function_from_signature(self.signature, self.params, BACKEND)(
                *args, **options
            )
            options, signature, constants, attrs = self._pack_args(BACKEND, options, bound, special, rest)
            source = ASTSource(self, signature, constants, attrs)
            compiled.append(triton.compile(source, target=TARGET, options=options.__dict__))

    monkeypatch.setattr(JITFunction, "run", run)
    size = choose_page_bytes(
        [block_formats[1].high], head_dim=head_dim, block_tokens=128, has_scores=False, whole=True
    )
    layout = PoolLayout(2, 8, head_dim, 128, size, False)
    store = PageStore.create(layout, block_formats, num_pages=4, num_blocks=3, dtype=torch.bfloat16, device="cpu")
    op = extend.ExtendAttention(
        store, query_heads=32, dense="none", fake_quant_format=block_formats[1].high, tuning=tuning
    )
    op.plan(torch.zeros((1, 4), dtype=torch.int32), [128], [168])
    q, k = (torch.zeros((168, n, head_dim), dtype=torch.bfloat16) for n in (32, 8))
    op.run(0, q, k, k, scale=1.0)
    return max(kernel.metadata.shared for kernel in compiled)


@pytest.mark.slow
@pytest.mark.parametrize("fmt, head_dim", [("k4v4", 256), ("k8v8", 256), ("k4v4", 128)])
def test_kernel_fits_shared_memory(fmt, head_dim, monkeypatch):
    assert shared_memory(fmt, head_dim, extend.Tuning.best(head_dim, SHARED), monkeypatch) <= SHARED


def test_two_stages_fit_where_chosen(monkeypatch):
    assert SHARED < shared_memory("k4v4", 256, extend.Tuning(), monkeypatch) <= extend.WIDE_SHARED
