"""Serving recompiles no kernel because of another batch size or another address of a view.

Triton compiles a kernel once for each combination of what it specialises on: dtypes, constants, which integers are 1 or
divide by 16, which addresses divide by 16. Launches are not run here; their combinations are counted.
"""

import pytest
import sglang.srt.utils.common  # noqa: F401  changes triton, as in every server
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction, create_function_from_signature

from kvc_kernels import ops
from kvc_kernels.compact.launch import compact_triton
from kvc_kernels.extend.attention import ExtendAttention
from kvc_kernels.extend.merge_kernel import merge_states
from kvc_kernels.pages import kernel as page_kernels
from kvc_kernels.tiering.keydiff_kernel import keydiff_blocks
from kvc_kernels.tiering.thresholds_kernel import plan_thresholds_triton
from sglang_kvc.engine.attention import Attention, Snapshot
from tests.support.pages import KernelStore, block_formats_of, make_store

P, HEADS = 32, 3
BACKEND = CUDABackend(GPUTarget("cuda", 90, 32))


@pytest.fixture
def launched(monkeypatch):
    """A map from kernel name to the combinations of its launches."""
    seen, binders = {}, {}

    def run(self, *args, grid, warmup, **options):
        if self not in binders:
            binders[self] = create_function_from_signature(self.signature, self.params, BACKEND)
        _, combination, _ = binders[self](*args, **options)
        seen.setdefault(self.__name__, set()).add(tuple(combination))

    monkeypatch.setattr(JITFunction, "run", run)
    return seen


def test_triton_is_patched_as_in_server():
    assert not isinstance(triton.next_power_of_2, type(triton.cdiv))  # replaced by SGLang, so no kernel may call it


def kernel_store(**options):
    # With three heads and one layer nothing is divisible by 16 by chance.
    base = make_store(
        block_formats_of("k4v4"), heads=HEADS, head_dim=64, block_tokens=P, layers=1, blocks=40, **options
    )
    return KernelStore(**vars(base))


def once(launched, *names):
    assert {n: len(launched[n]) for n in names} == dict.fromkeys(names, 1)


def rows_of(requests, blocks):
    return torch.zeros((requests, blocks), dtype=torch.int32)


@pytest.mark.parametrize("sampling", [None, ops.ScoreSampling(window=8)])
def test_decode_compiles_once(launched, sampling):
    engine = Attention(
        kernel_store(has_scores=sampling is not None), sampling, query_heads=HEADS * 3, max_batch=17, max_blocks=21
    )
    table, ones = torch.zeros((17, 21 * P), dtype=torch.int32), torch.ones(32, dtype=torch.int64)
    for n in range(1, 17):
        for at in (0, 1):  # a slice at an odd address
            lens = [1 + 37 * i % (20 * P) for i in range(n)]
            snap = engine.plan_decode(table, ones[at : at + n], ones[at : at + n], lens)
            if sampling:
                engine.note(snap, None)
            q, k = (torch.zeros((n, h, 64), dtype=torch.bfloat16) for h in (HEADS * 3, HEADS))
            engine.decode(0, q, k, k, scale=1.0, logit_cap=0.0)
    names = ["_snapshot_kernel", "_split_kernel", "_items_kernel", "_append_kernel", "merge_kernel"]
    names.append(engine.decoders[-1]._kernel.__name__)
    once(launched, *names, *(["_step_kernel", "_list_kernel", "note_kernel"] if sampling else []))


@pytest.mark.parametrize("stored", [False, True])
def test_extend_compiles_once(launched, stored):
    store = kernel_store()
    fmt = block_formats_of("k4v4")[1].high
    op = ExtendAttention(store, query_heads=HEADS * 3, dense="none", fake_quant_format=fmt if stored else None)
    for n in range(1, 7):
        for blocks in (1, 2, 3, 16):
            prefix, new = [max(0, P * (blocks - 1) - i) for i in range(n)], [1 + 3 * i % P for i in range(n)]
            new[0] = 2 * P if stored else 5
            op.plan(rows_of(n, blocks + 2), prefix, new)
            q, k = (torch.zeros((sum(new), h, 64), dtype=torch.bfloat16) for h in (HEADS * 3, HEADS))
            op.run(0, q, k, k, scale=1.0)
    once(launched, "_split_kernel", "_extend_kernel", *(["_fake_quant_kernel"] if stored else []))


def test_join_of_exact_and_staged_rows_compiles_once(launched):
    for n in range(1, 9):
        (a, b), (x, y) = torch.zeros((2, n, 9, 64)), torch.zeros((2, n, 9))
        merge_states(a, x, b, y, a, x)
    once(launched, "_merge_states_kernel")


def test_decode_and_extend_share_kernels(launched):
    fmt = block_formats_of("k4v4")[1].high
    engine = Attention(kernel_store(), None, fmt, query_heads=HEADS * 3, max_batch=17, max_blocks=21)
    q, k = (torch.zeros((3, h, 64), dtype=torch.bfloat16) for h in (HEADS * 3, HEADS))
    ones = torch.ones(3, dtype=torch.int64)
    engine.plan_decode(torch.zeros((17, 21 * P), dtype=torch.int32), ones, ones, [1, 1, 1])
    engine.decode(0, q, k, k, scale=1.0, logit_cap=0.0)
    for waiting in ([], [0]):
        engine.plan_extend(
            Snapshot(rows_of(1, 3), ones[:1], ones, ones.clone(), [P + 8], [P + 5], [3], waiting_cpu=[waiting])
        )
        engine.extend(0, q, k, k, scale=1.0, logit_cap=0.0)
    once(launched, "_split_kernel", "_append_kernel")


def test_page_operations_compile_once(launched):
    store = kernel_store()
    for n in range(1, 18):
        blocks = torch.arange(n)
        page_kernels.take_bf16(store, blocks)
        page_kernels.release(store, blocks)
    once(launched, "_take_kernel", "_taken_kernel", "_count_kernel", "_exchange_kernel", "_finish_kernel")


def test_compaction_compiles_once(launched):
    store = kernel_store()
    for n in range(1, 18):
        compact_triton(store, torch.arange(n), 1, ops.keep_all(n, store.layout), from_format=0)
    once(launched, "pack_kernel", "_count_kernel", "_exchange_kernel", "_finish_kernel")


def test_keydiff_compiles_once(launched):
    store = kernel_store()
    for n in range(1, 18):
        keydiff_blocks(store, torch.arange(n))
    once(launched, "keydiff_kernel")


def test_threshold_plan_compiles_once(launched):
    store, alpha = make_store(block_formats_of("k8v4+k4v2"), head_dim=64, has_scores=True), ops.Thresholds(1.0, 0.02)
    for n in range(1, 18):
        blocks, starts, lengths, prompts = (torch.arange(n) for _ in range(4))
        plan_thresholds_triton(
            store, blocks, starts, lengths, prompts, alpha, ops.ScoreSampling(), from_format=1,
            to=store.block_formats[1],
        )
    once(launched, "thresholds_kernel")
