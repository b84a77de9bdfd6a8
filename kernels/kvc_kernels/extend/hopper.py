"""Prefill with cached prefix on Hopper, in CUDA C++ (`extend/cuda/extend.cu`): tiles of 256 or 128 query rows.

Two warpgroups unpack pages of any format to fp16 tiles of 64 keys and values in shared memory; two more multiply them
(wgmma) and do the softmax. So unpacking overlaps with the tensor cores and serves all rows. head_dim is 128. The Triton
kernel of `ExtendAttention` does the same work on all GPUs; each of its warps unpacks, multiplies and does the softmax.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from ..common.format_class import FormatClass
from ..common.nvrtc import Kernel, Module, available
from ..common.unpack_kernel import LOG2E
from ..store import PageStore
from .planner import ExtendPlan

MERGE_WARPS = 4  # rows that a CTA merges
MAX_BLOCK_TOKENS = 2048  # LISTED tiles of `extend/cuda/extend.cu`
STAGES = 3  # unpacked tiles in flight
# Registers of a thread that multiplies and of one that unpacks, by query rows; twice their sum is 512.
REGISTERS = {256: (208, 48), 128: (168, 88)}
FEW_ROWS = 64  # maximum query rows of `extend/cuda/few.cu`, and the rows of its partial results
FEW_TOKENS = 1 << 15  # maximum tokens of its KV splits; it adds probabilities in fp16, which loses precision beyond
FEW_TIERS = (32, 64)  # query rows for which it is compiled
FEW_REGISTERS = (232, 40)  # registers of a thread that multiplies and of one that copies
FEW_PAGE_BYTES = 40 * 1024  # maximum bytes of a page, so that four fit next to its other shared memory


class Arguments(ctypes.Structure):
    """`Arguments` of `extend/cuda/extend.cu`."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in (
            "q", "k", "v", "out", "new_o", "new_lse", "part_o", "part_lse", "out_lse", "items", "lists", "sizes",
            "pages", "table", "counts", "headers",
        )],
        *[(f"{name}_stride_{of}", ctypes.c_int64) for name in "qkv" for of in "nh"],
        ("max_blocks", ctypes.c_int),
        ("layer", ctypes.c_int),
        ("factor", ctypes.c_float),
        ("inner", ctypes.c_float),
        ("cap_factor", ctypes.c_float),
    ]  # fmt: skip


class MergeArguments(ctypes.Structure):
    """`MergeArguments` of `extend/cuda/extend_merge.cuh`."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("part_o", "part_lse", "merges", "out", "out_lse")]


def supports(store: PageStore) -> bool:
    """Whether the kernel serves this store: on Hopper, with head_dim 128 and blocks that fit its tile list."""
    if store.device.type != "cuda" or torch.cuda.get_device_capability(store.device) != (9, 0):
        return False
    return store.layout.head_dim == 128 and store.layout.block_tokens <= MAX_BLOCK_TOKENS and available()


def supports_few(classes: tuple[FormatClass, ...]) -> bool:
    """Whether `extend/cuda/few.cu` serves these classes: codes of 4 and 8 bits, and rows in the model's dtype."""
    packed = [c for c in classes if c.key_bits < 16]
    return all(c.key_bits in (4, 8) and c.value_bits in (4, 8) and c.used_bytes <= FEW_PAGE_BYTES for c in packed)


def constants(store: PageStore, group: int, classes: tuple[FormatClass, ...], rows: int, capped: bool) -> str:
    """Constants with which `extend/cuda/extend.cu` is compiled, or `few.cu` for `rows` of FEW_TIERS."""
    g = store.layout
    numbers = dict(
        H=g.heads, G=group, LH=g.layers * g.heads, E=g.head_pages_bf16, P=g.block_tokens, PAGE_BYTES=g.page_bytes,
    )  # fmt: skip
    if rows in FEW_TIERS:
        numbers |= dict(QUERIES=rows, ATTEND_REGISTERS=FEW_REGISTERS[0], PAGE_REGISTERS=FEW_REGISTERS[1])
    else:
        attend, unpack = REGISTERS[rows]
        numbers |= dict(GROUPS=rows // 128, STAGES=STAGES, ATTEND_REGISTERS=attend, UNPACK_REGISTERS=unpack)
    flags = dict(CAPPED=capped, MODEL_BF16=store.dtype == torch.bfloat16)
    listed = ", ".join("{" + ", ".join(map(str, c)) + "}" for c in classes)
    return "\n".join([
        f"#define KVC_CLASSES {listed}",
        *(f"constexpr int {name} = {value};" for name, value in numbers.items()),
        *(f"constexpr bool {name} = {str(value).lower()};" for name, value in flags.items()),
    ])  # fmt: skip


@cache
def _kernels(source: str, text: str, device: torch.device) -> tuple[Kernel, Kernel]:
    """(attention over KV splits, merge of their states); compiled at first use, in about two seconds."""
    module = Module(source, text)
    return Kernel(module, "extend", shared=module.integer("shared_bytes")), Kernel(module, "merge", early=True)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`x`, or a copy whose rows begin at multiples of 16 bytes, which the kernel requires."""
    aligned = x.data_ptr() % 16 == 0 and all(s * x.element_size() % 16 == 0 for s in x.stride()[:-1])
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


class HopperExtend:
    """Launches of one store: `plan` once a forward, `launch` for each layer."""

    def __init__(self, store: PageStore, group: int, classes: tuple[FormatClass, ...]):
        self.store, self.group, self.classes = store, group, classes
        self._kernels: dict[tuple[int, bool], tuple[Kernel, Kernel]] = {}
        # A launch copies its struct, so that all launches can share one.
        self._arguments, self._merge_arguments = Arguments(), MergeArguments()
        self._strides = self._scaling = None  # strides, and (scale, cap), in `_arguments`

    def kernels(self, rows: int, capped: bool) -> tuple[Kernel, Kernel]:
        if (rows, capped) not in self._kernels:
            text = constants(self.store, self.group, self.classes, rows, capped)
            source = "few.cu" if rows in FEW_TIERS else "extend.cu"
            self._kernels[rows, capped] = _kernels(source, text, self.store.device)
        return self._kernels[rows, capped]

    def plan(self, plan: ExtendPlan, rows: int, part_o: torch.Tensor, part_lse: torch.Tensor) -> None:
        """Plan for `rows` query rows per CTA: FEW_ROWS, 128 or 256. `part_o` (memory for fp16 `[n_slots, H, rows, D]`)
        and `part_lse` (fp32 `[n_slots, H, rows]`) may be larger. They stay in place until the last `launch`."""
        store, few, a, b = self.store, rows == FEW_ROWS, self._arguments, self._merge_arguments
        tensors = dict(
            part_o=part_o, part_lse=part_lse, items=plan.items, lists=plan.lists, sizes=plan.sizes, pages=store.pages,
            table=store.table, counts=store.counts, headers=store.headers,
        )  # fmt: skip
        for name, x in tensors.items():
            setattr(a, name, x.data_ptr())
        a.max_blocks = plan.max_blocks
        b.part_o, b.part_lse, b.merges = a.part_o, a.part_lse, plan.merges.data_ptr()
        self._rows = min(n for n in FEW_TIERS if n >= plan.most_rows) if few else rows
        self._ctas, self._threads = plan.n_items * store.layout.heads, 384 if few else 512
        self._merge_ctas = plan.n_merges * store.layout.heads * rows // MERGE_WARPS

    def launch(self, layer: int, q, k, v, out, lse, new_state, scale: float, logit_cap: float) -> None:
        """Launch for one layer of the planned forward; the arguments are as in `ExtendAttention._attend`."""
        a, b = self._arguments, self._merge_arguments
        strides = q.stride(), k.stride(), v.stride()
        # The strides in `_arguments` are those of rows that need no copy.
        if strides != self._strides or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16:
            q, k, v = _rows(q), _rows(k), _rows(v)
            self._set_strides(q, k, v)
        if (scale, logit_cap) != self._scaling:
            self._set_scaling(scale, logit_cap)
        new_o, new_lse = new_state or (None, None)
        a.q, a.k, a.v, a.layer = q.data_ptr(), k.data_ptr(), v.data_ptr(), layer
        a.out = b.out = out.data_ptr()
        a.out_lse = b.out_lse = None if lse is None else lse.data_ptr()
        a.new_o = None if new_o is None else new_o.data_ptr()
        a.new_lse = None if new_lse is None else new_lse.data_ptr()
        attend, merge = self.kernels(self._rows, logit_cap > 0)
        attend.launch(self._ctas, self._threads, a)
        if self._merge_ctas:
            merge.launch(self._merge_ctas, 32 * MERGE_WARPS, b)

    def _set_strides(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        for name, x in (("q", q), ("k", k), ("v", v)):
            setattr(self._arguments, f"{name}_stride_n", x.stride(0) * x.element_size())
            setattr(self._arguments, f"{name}_stride_h", x.stride(1) * x.element_size())
        self._strides = q.stride(), k.stride(), v.stride()

    def _set_scaling(self, scale: float, logit_cap: float) -> None:
        a, capped = self._arguments, logit_cap > 0
        a.factor = scale * LOG2E.value
        a.inner = 2 * scale * LOG2E.value / logit_cap if capped else 0.0
        a.cap_factor = logit_cap * LOG2E.value if capped else 0.0
        self._scaling = scale, logit_cap
