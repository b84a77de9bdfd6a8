"""The kernels of layers with windows compile for Hopper and for a GPU with 99 KB of shared memory, without a GPU."""

import pytest
import sglang.srt.server_args  # noqa: F401  (replaces functions of triton, as in a server)
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, create_function_from_signature

from kvc_kernels.decode import attention as decode
from kvc_kernels.extend.windowed import WindowedExtend
from kvc_kernels.extend.windowed_kernel import window_kernel
from kvc_kernels.layout import PoolLayout, choose_page_bytes
from kvc_kernels.store import PageStore
from tests.support.decode import block_formats_of


@pytest.fixture
def compiled(monkeypatch):
    """The (kernel name, compiled kernel) pairs of all launches, which do not run, and an object whose `capability`
    selects the GPU."""
    kernels = []

    def run(self, *args, grid, warmup, **options):
        target = GPUTarget("cuda", run.capability, 32)
        backend = CUDABackend(target)
        if self in (decode._decode_kernel, window_kernel):
            bound, special, rest = create_function_from_signature(self.signature, self.params, backend)(
                *args, **options
            )
            options, signature, constants, attrs = self._pack_args(backend, options, bound, special, rest)
            source = ASTSource(self, signature, constants, attrs)
            kernels.append((self.__name__, triton.compile(source, target=target, options=options.__dict__)))

    run.capability = 90
    monkeypatch.setattr(JITFunction, "run", run)
    return kernels, run


def store_of(fmt, head_dim):
    block_formats = block_formats_of(fmt)
    size = choose_page_bytes(
        [block_formats[1].high], head_dim=head_dim, block_tokens=128, has_scores=False, whole=True
    )
    layout = PoolLayout(2, 4, head_dim, 128, size, False)
    return PageStore.create(layout, block_formats, num_pages=4, num_blocks=3, dtype=torch.bfloat16, device="cpu")


@pytest.mark.parametrize("fmt, head_dim", [("k4v4", 128), ("k4v4", 256), ("k8v4", 64)])
def test_decode_compiles(fmt, head_dim, compiled):
    store, (kernels, _) = store_of(fmt, head_dim), compiled
    for window in (-1, 511):
        op = decode.DecodeAttention(store, max_batch=2, max_blocks=8, query_heads=8, columns=2, window=window)
        q = torch.zeros((1, 8, head_dim), dtype=torch.bfloat16)
        op.run(0, q, scale=1.0)
    (_, plain), (_, windowed) = kernels
    assert plain.metadata.shared == windowed.metadata.shared <= 99 * 1024 // 4


@pytest.mark.parametrize("head_dim, capability", [(256, 89), (128, 89), (256, 90), (64, 90)])
def test_extend_compiles(head_dim, capability, compiled):
    kernels, run = compiled
    run.capability = capability
    op = WindowedExtend(store_of("k4v4", head_dim), query_heads=16, window=511)
    op.plan(torch.zeros((1, 4), dtype=torch.int32), [128], [168])
    op.run(0, *3 * [torch.zeros((168, 16, head_dim), dtype=torch.bfloat16)], scale=1.0, logit_cap=30.0)
    ((name, kernel),) = kernels
    assert name == "window_kernel" and kernel.metadata.shared <= 99 * 1024
