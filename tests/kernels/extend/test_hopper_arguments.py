"""Arguments of the Hopper kernels, forward by forward and layer by layer, without a GPU: launches are recorded."""

import ctypes
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from kvc_kernels.common import nvrtc
from kvc_kernels.common.unpack_kernel import LOG2E
from kvc_kernels.extend import hopper, planner
from kvc_kernels.extend.attention import ExtendAttention
from tests.support.pages import make_store
from tests.support.rows import ALIGNED, LAYOUTS, laid_out

HEADS, GROUP, DIM, P = 2, 4, 128, 128
TOKENS = 8  # tokens of a launch whose rows are read


class Recorder:
    """In place of a kernel: copies the struct of each launch, and the first number of rows that it points to."""

    def __init__(self, name: str, launches: list):
        self.name, self.launches = name, launches

    def launch(self, ctas: int, threads: int, arguments: ctypes.Structure) -> None:
        a, numbers = type(arguments).from_buffer_copy(arguments), {}
        for x in "qkv" if self.name.startswith("extend") else "":
            at, strides = getattr(a, x), [getattr(a, f"{x}_stride_{of}") for of in "nh"]
            assert not any(n % 16 for n in (at, *strides))
            heads = HEADS * (GROUP if x == "q" else 1)
            addresses = [[at + n * strides[0] + h * strides[1] for h in range(heads)] for n in range(TOKENS)]
            numbers[x] = [[ctypes.c_int16.from_address(address).value for address in row] for row in addresses]
        self.launches.append(SimpleNamespace(kernel=self.name, ctas=ctas, threads=threads, a=a, numbers=numbers))


@pytest.fixture
def launches(monkeypatch):
    """Launches of CUDA C++ kernels so far. Triton's are not run."""
    seen = []

    def kernels(source, text, device):
        name = source + " capped" * ("CAPPED = true" in text)
        return Recorder(f"extend {name}", seen), Recorder(f"merge {name}", seen)

    monkeypatch.setattr(hopper, "supports", lambda store: True)
    monkeypatch.setattr(hopper, "_kernels", kernels)
    monkeypatch.setattr(planner, "_split_kernel", mock.MagicMock())
    return seen


@pytest.fixture
def op(launches):
    store = make_store(layers=9, heads=HEADS, head_dim=DIM, block_tokens=P, blocks=1)
    op = ExtendAttention(store, query_heads=HEADS * GROUP, dense="none", hopper=True)
    op._sms = 132
    return op


def plan(op, prefix, new):
    op.plan(torch.zeros((len(new), 99), dtype=torch.int32), prefix, new)


def rows(tokens, layout):
    """q, k and v `[N, H, D]` bf16."""
    heads = (HEADS * GROUP, HEADS, HEADS)
    return [laid_out(torch.randn((tokens, h, DIM)).bfloat16(), layout) for h in heads]


def address(x):
    return None if x is None else x.data_ptr()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_aligned(layout):
    """Contiguous rows at an odd address are copied, too."""
    x, *_ = rows(TOKENS, layout)
    aligned = hopper._rows(x)
    assert torch.equal(aligned, x) and not aligned.data_ptr() % 16 and not any(n % 8 for n in aligned.stride()[:2])
    assert (aligned is x) == (layout in ALIGNED)


def test_each_layer_has_its_own_arguments(op, launches):
    tokens = 150
    plan(op, [90 * P], [tokens])
    states = [None, (torch.empty(tokens, HEADS * GROUP, DIM), torch.empty(tokens, HEADS * GROUP))]
    layouts = ["contiguous"] * 2 + ["packed", "odd address", "contiguous", "padded", "padded", "packed"]
    kinds = [(0.09, 0.0), (0.09, 0.0), (0.2, 0.0), (0.2, 30.0), (0.2, 50.0), (0.1, 50.0), (0.1, 0.0), (0.09, 0.0)]
    for layer, (rows_layout, (scale, cap)) in enumerate(zip(layouts, kinds)):
        q, k, v = rows(tokens, rows_layout)
        out, lse = torch.empty(q.shape, dtype=q.dtype), torch.empty(q.shape[:2]) if layer % 3 else None
        state = states[layer % 2]
        launches.clear()
        op._attend(layer, q, k, v, out, lse, state, scale, cap)
        attend, merge = launches
        kernel = "extend.cu" + " capped" * (cap > 0)
        assert (attend.kernel, merge.kernel) == (f"extend {kernel}", f"merge {kernel}")
        for x, tensor in zip("qkv", (q, k, v)):
            assert attend.numbers[x] == tensor[:TOKENS, :, 0].view(torch.int16).tolist()
        a, b = attend.a, merge.a
        assert (a.layer, a.out, b.out) == (layer, address(out), address(out))
        assert (a.out_lse, b.out_lse) == (address(lse), address(lse))
        assert (a.new_o, a.new_lse) == tuple(map(address, state or (None, None)))
        inner, cap_factor = (2 * scale * LOG2E.value / cap, cap * LOG2E.value) if cap else (0.0, 0.0)
        assert (a.factor, a.inner, a.cap_factor) == pytest.approx((scale * LOG2E.value, inner, cap_factor))


def test_rows_without_a_copy_are_passed_as_they_are(op, launches):
    plan(op, [90 * P], [150])
    for layer, layout in enumerate(ALIGNED * 2):
        q, k, v = rows(150, layout)
        op._attend(layer, q, k, v, torch.empty(q.shape), None, None, 0.1, 0.0)
        a = launches[-2].a
        assert (a.q, a.k, a.v) == tuple(map(address, (q, k, v)))


def test_each_forward_has_its_own_plan(op, launches):
    """Buffers grow, tiles and kernels change, and a forward without splits launches no merge."""
    pools = [getattr(op.store, name) for name in ("pages", "table", "counts", "headers")]
    buffers = set()
    cases = [([20 * P], [30]), ([99 * P], [200]), ([90 * P, 0], [3, 5]), ([P] * 200, [33] * 200), ([99 * P], [1500])]
    for prefix, new in cases:
        plan(op, prefix, new)
        q, k, v = rows(sum(new), "packed")
        launches.clear()
        op._attend(1, q, k, v, torch.empty(q.shape), None, None, 0.1, 0.0)
        p, tile, a = op._plan, op.steps.rows, launches[0].a
        assert launches[0].kernel == ("extend few.cu" if tile == hopper.FEW_ROWS else "extend extend.cu")
        assert (launches[0].ctas, launches[0].threads) == (p.n_items * HEADS, 384 if tile == hopper.FEW_ROWS else 512)
        assert (a.items, a.lists, a.sizes) == tuple(map(address, (p.items, p.lists, p.sizes)))
        assert (a.part_o, a.part_lse, a.max_blocks) == (address(op._part_o), address(op._part_lse), p.max_blocks)
        assert [a.pages, a.table, a.counts, a.headers] == [*map(address, pools)]
        assert len(launches) == 1 + (p.n_merges > 0)
        if p.n_merges:
            b = launches[1].a
            assert launches[1].ctas * hopper.MERGE_WARPS == p.n_merges * HEADS * tile
            assert (b.part_o, b.part_lse, b.merges) == (a.part_o, a.part_lse, address(p.merges))
        buffers.add((op._part_o.numel(), p.n_merges > 0, tile))
    assert len({n for n, *_ in buffers}) > 2 and {x for _, x, _ in buffers} == {False, True}
    assert {tile for *_, tile in buffers} == {hopper.FEW_ROWS, 128, 256}


def test_a_plan_may_be_empty(op):
    plan(op, [], [])
    plan(op, [P], [0])


def test_launch_points_to_its_own_struct():
    """Two launches of a kernel with different structs, as the driver reads them."""
    seen = []

    def launch(config, function, pointers, extra):
        values = ctypes.cast(ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p))[0], ctypes.POINTER(ctypes.c_int))
        config = config._obj
        seen.append((config.gx, config.bx, config.stream, values[0]))
        return int(config.gx == 0)

    driver = SimpleNamespace(cuLaunchKernelEx=launch, cuModuleGetFunction=lambda *a: 0, cuFuncSetAttribute=lambda *a: 0)
    kernel = nvrtc.Kernel(SimpleNamespace(driver=driver, handle=None), "extend")
    with mock.patch.object(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=11)):
        for ctas, value in ((3, 5), (4, 6)):
            kernel.launch(ctas, 64, (ctypes.c_int * 2)(value, 0))
        with pytest.raises(RuntimeError, match="cuLaunchKernelEx failed with code 1"):
            kernel.launch(0, 64, (ctypes.c_int * 2)(7, 0))
    assert seen == [(3, 64, 11, 5), (4, 64, 11, 6), (0, 64, 11, 7)]
