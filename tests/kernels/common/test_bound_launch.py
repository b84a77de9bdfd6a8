"""Launches of the layers of a forward: each runs a kernel that was compiled for arguments like its own. No GPU."""

import random
from types import SimpleNamespace

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction, create_function_from_signature

from kvc_kernels import ops
from kvc_kernels.append.kernel import LayerAppend, _append_kernel
from kvc_kernels.common.bound_launch import BoundLaunch
from kvc_kernels.extend.fake_quant_kernel import FakeQuantRows, _fake_quant_kernel
from kvc_kernels.records.kernel import _copy_records_kernel
from kvc_kernels.store import PageStore
from tests.support.pages import make_store
from tests.support.rows import LAYOUTS, laid_out

BACKEND = CUDABackend(GPUTarget("cuda", 90, 32))


class Compiled(CompiledKernel):
    """A compiled kernel that records its launches instead of running them."""

    function, packed_metadata, src = "function", "metadata", None

    def __init__(self, specialization, launches):
        self.specialization, self.launches = specialization, launches

    def __del__(self):
        pass

    def _init_handles(self):
        pass

    def run(self, x, y, z, stream, function, packed_metadata, launch_metadata, enter_hook, exit_hook, *args):
        assert (function, packed_metadata) == (self.function, self.packed_metadata)
        self.launches.append(SimpleNamespace(
            grid=(x, y, z), stream=stream, args=args, hooks=(enter_hook, exit_hook), compiled_for=self.specialization,
            ordinary=False,
        ))  # fmt: skip

    def launch_metadata(self, grid, stream, *args):
        return None


def specialized(kernel, *args, **options):
    """What Triton compiles `kernel` for, and its arguments in order."""
    bind = create_function_from_signature(kernel.signature, kernel.params, BACKEND)
    bound, specialization, _ = bind(*args, **options)
    return [str(x) for x in specialization], tuple(bound.values())


@pytest.fixture
def launches(monkeypatch):
    """All launches so far; the driver and the compiler are replaced."""
    seen = []

    def run(self, *args, grid, warmup, **options):
        specialization, bound = specialized(self, *args, debug=False, **options)
        kernel = Compiled(specialization, seen)
        kernel.run(*grid, 11, kernel.function, kernel.packed_metadata, None, None, None, *bound)
        seen[-1].ordinary = True
        return kernel

    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 11)
    monkeypatch.setattr(triton.runtime.driver, "_active", active)
    monkeypatch.setattr(JITFunction, "run", run)
    return seen


def passed(launch, *tensors):
    """The arguments of a launch, with those of `tensors` in place of addresses."""
    at = {x.data_ptr(): x for x in tensors if isinstance(x, torch.Tensor)}
    assert launch.ordinary or not any(isinstance(x, torch.Tensor) for x in launch.args)
    return [x if isinstance(x, torch.Tensor) else at.get(x, x) for x in launch.args]


def same(a, b):
    return a is b or (not isinstance(a, torch.Tensor) and a == b)


def test_each_append_runs_a_kernel_compiled_for_its_rows(launches):
    """Dtypes, strides and addresses vary from layer to layer."""
    for heads, dim in ((8, 128), (3, 20), (1, 64)):
        store = make_store(heads=heads, head_dim=dim, layers=400)
        append, gen, ordinary = LayerAppend(store), random.Random(3), 0
        append.plan(blocks := torch.zeros(5, dtype=torch.int64), offsets := torch.zeros(5, dtype=torch.int32))
        launches.clear()
        for layer in range(400):
            rows = [torch.randn((5, heads, dim)).to(store.dtype) for _ in "kv"]
            k, v = (laid_out(x, gen.choice(LAYOUTS)) for x in rows)
            if gen.random() < 0.2:  # heads at any distance, also 1, and any even address
                flat = torch.zeros(9000, dtype=store.dtype)
                k = flat.as_strided(k.shape, (gen.choice([1, 8, 16, 40]), gen.choice([1, 16, 17]), 1), gen.randrange(9))
            append.run(layer, k, v)
            x = launches[-1]
            args = (layer * heads, k, v, *k.stride()[:2], *v.stride()[:2])
            shared = (store.pages, store.table, blocks, offsets, store.like, *append._constants)
            found = passed(x, k, v, *shared)
            assert all(map(same, found, (*args, *shared))) and len(found) == len(args + shared)
            assert (x.grid, x.stream) == ((5, 1, 1), 11)
            assert x.compiled_for == specialized(_append_kernel, *found, debug=False, **append._options)[0]
            ordinary += x.ordinary
        assert len(launches) == 400 and 16 <= ordinary < 200


def test_each_part_of_records_runs_a_kernel_compiled_for_it(launches, monkeypatch):
    """Parts differ in the number and the length of their records, and in the address of their blocks."""
    monkeypatch.setattr(PageStore, "use_kernels", property(lambda self: True))
    store, gen = make_store(), random.Random(5)
    blocks, data = torch.arange(60), torch.zeros(40_000, dtype=torch.uint8)
    for _ in range(200):
        n, stride, begin = gen.randint(1, 3), 4 * gen.choice([1000, 1024, 1026]), gen.randrange(20)
        records = data.as_strided((n, stride), (stride, 1), 4 * gen.randrange(9))
        read = gen.random() < 0.5
        part = blocks[begin:] if read else blocks[begin : begin + n]
        if read:
            ops.read_records(store, part, records, first=gen.randrange(30))
        else:
            ops.write_records(store, part, records)
        x = launches[-1]
        words = records.view(torch.int32)
        args = passed(x, part, words, *store.launch_constants["copy_records", not read]._shared)
        assert x.compiled_for == specialized(_copy_records_kernel, *args, debug=False, num_warps=1)[0]
        assert args[1].data_ptr() == part.data_ptr() and args[2].data_ptr() == words.data_ptr()
        assert (args[3], x.grid) == (stride // 4, (n * store.layout.layers * store.layout.heads, 1, 1))
        assert args[-1] is not read
    assert 20 < sum(not x.ordinary for x in launches) < 200


def test_layers_with_like_rows_share_a_launch(launches):
    store = make_store(layers=9)
    append = LayerAppend(store)
    for tokens in (5, 7):
        append.plan(torch.zeros(tokens, dtype=torch.int64), torch.zeros(tokens, dtype=torch.int64))
        launches.clear()
        for layer in range(9):
            k = torch.zeros((tokens, 2, 32), dtype=store.dtype)
            append.run(layer, k, k)
        assert [x.ordinary for x in launches] == [True] + 8 * [False]
        assert {x.grid for x in launches} == {(tokens, 1, 1)}
    append.run(0, k[:3], k[:3])
    assert launches[-1].grid == (3, 1, 1)
    append.run(0, k[:0], k[:0])
    assert len(launches) == 10


def test_fill_launches_the_compiled_kernel(launches):
    """With the buffers of the last plan."""
    store = make_store(layers=9, block_tokens=64)
    rows = FakeQuantRows(store, store.block_formats[1].high)
    for slots, n in ((4, 3), (9, 8), (2, 1)):
        row_blocks, items = torch.zeros((2, 16 * n + 1), dtype=torch.int32), torch.zeros((n, 8), dtype=torch.int32)
        rows.plan(row_blocks, items, slots)
        launches.clear()
        for layer in range(9):
            rows.fill(layer)
            x = launches[-1]
            shared = (store.pages, store.table, row_blocks, 16 * n + 1, items, rows.k, rows.v, 9)
            args = passed(x, *shared)
            assert all(map(same, args, (layer, *shared))) and x.grid == (n, 2, 2)
            assert x.compiled_for == specialized(_fake_quant_kernel, *args, debug=False, num_warps=8)[0]
        assert [x.ordinary for x in launches] == [True] + 8 * [False]


def test_long_indices_and_other_dtypes_have_their_own_kernels(launches):
    append = LayerAppend(store := make_store())
    append.plan(places := torch.zeros(5, dtype=torch.int64), places)
    k, other = (torch.zeros((5, 2, 32), dtype=dtype) for dtype in (store.dtype, torch.float32))
    cases = [(n, k) for n in (0, 1, 16, 2**31 - 1, 2**31, 2**31 + 1, 2**32, 2**63, 5)] + [(0, other), (1, other)]
    for index, v in cases:
        append._launch((5, 1, 1), index, k, v)
        x = launches[-1]
        args = passed(x, k, v, *append._launch._shared)
        assert x.compiled_for == specialized(_append_kernel, *args, debug=False, **append._options)[0]
    assert [x.ordinary for x in launches] == [n in (0, 4, 6, 7, 9) for n in range(len(cases))]


def test_launch_hooks_are_passed(launches, monkeypatch):
    launch = BoundLaunch(_append_kernel, *range(7))
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", "enter")
    compiled = Compiled([], launches)
    monkeypatch.setattr(JITFunction, "run", lambda *args, **options: compiled)
    for _ in range(2):
        launch((1, 1, 1), 0)
    assert [x.hooks[0] for x in launches] == ["enter"]


def test_without_a_compiled_kernel_every_launch_is_an_ordinary_one(monkeypatch):
    seen = []
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, **options: seen.append((args, options)))
    launch = BoundLaunch(_append_kernel, 7, 8, num_warps=2)
    for index in range(3):
        launch((4, 1, 1), index)
    assert seen == [((index, 7, 8), dict(grid=(4, 1, 1), warmup=False, num_warps=2)) for index in range(3)]
