"""A server's warm-up launches every kernel that serving launches, with the same constants and specializations.

Launches are not run: their combinations, which choose the compiled kernel, are compared.
"""

import logging
import os
import random
from functools import partial
from unittest import mock

import numpy as np
import pytest
import sglang.srt.utils.common  # noqa: F401  changes triton, as in every server
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction, create_function_from_signature

from kvc_kernels.decode.attention import DecodeAttention
from kvc_kernels.extend import attention as extend_module
from kvc_kernels.extend import dense_flashinfer
from kvc_kernels.extend import hopper as hopper_module
from kvc_kernels.extend.attention import ExtendAttention
from kvc_kernels.scores.prefill_kernel import AttentionScores
from kvc_kernels.store import PageStore
from sglang_kvc.cache.build import build_runtime
from sglang_kvc.engine import warm_up
from sglang_kvc.engine.attention import Attention, Snapshot
from sglang_kvc.options.config import KvcConfig
from sglang_kvc.options.request_quality import offered
from sglang_kvc.policies.scorers.keydiff import KeyDiff

P, HEADS, GROUP, DIM, LAYERS = 32, 3, 3, 128, 2  # nothing else is divisible by 16 by chance
REQUESTS, COLUMNS = 7, 200
BACKEND = CUDABackend(GPUTarget("cuda", 90, 32))
CONFIGURATIONS = [
    dict(policy="quantize", high="bf16"),
    dict(policy="quantize", high="k4v4"),
    dict(policy="quantize", high="k4v4", levels=("k8v4",)),
    dict(policy="quantize", high="k4v4", host_memory=1 << 24),
    dict(policy="quantize", high="k8v4", floor="k2v2", host_memory=1 << 24),
    dict(policy="quota", keep=0.5),
    dict(policy="kv-compress", keep=0.5),
    dict(policy="leankv", high="k8v4", low="k4v2", alpha_high=1.0, alpha_low=0.05),
    dict(policy="leankv", high="k8v4", low="k4v2", alpha_high=1.0, alpha_low=0.05, lag=512),
    dict(policy="kv-compress", high="k4v4", keep=0.5, lag=512),
]


class FlashInfer:
    """Replaces FlashInfer's wrappers, which need a GPU and exactly as many queries as they were planned for."""

    def __init__(self, *args):
        pass

    def plan(self, starts, *args, **options):
        self.queries = int(starts[-1])

    def run(self, q, *rows, out=None, lse=None, return_lse=False):
        assert len(q) == self.queries
        out, lse = (torch.empty_like(q) if x is None else x for x in (out, lse))
        return (out, q.new_empty(q.shape[:2], dtype=torch.float32)) if return_lse else out


class WideExtend(ExtendAttention):
    """Cuts prefixes as for a GPU."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._sms = 132


class CudaKernel:
    """Records its name in place of launching a CUDA C++ kernel."""

    def __init__(self, source, text, launched):
        self.source, self.text, self.launched = source, text, launched

    def launch(self, programs, threads, arguments):
        self.launched.add((self.source, self.text, ""))


def assert_one_writer(rows, tokens):
    """A block has the same place in all sampled requests; otherwise two programs would add to its scores at once."""
    seen = {(int(b), j) for row, n in zip(rows, tokens.tolist()) for j, b in enumerate(row[: -(-n // P)])}
    assert len(seen) == len({b for b, _ in seen})


@pytest.fixture
def launched(monkeypatch):
    """All (kernel, combination, options) launched so far, as on a GPU, from a pool on the CPU."""
    seen, binders = set(), {}

    def run(self, *args, grid, warmup, **options):
        if self not in binders:
            binders[self] = create_function_from_signature(self.signature, self.params, BACKEND)
        _, combination, rest = binders[self](*args, **options)
        seen.add((self.__name__, str(combination), str(sorted(rest.items()))))

    def checked_add(self, *args, **options):
        assert_one_writer(self._rows, self._requests[:, 0])
        add(self, *args, **options)

    add = AttentionScores.add
    monkeypatch.setattr(AttentionScores, "add", checked_add)
    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(PageStore, "use_kernels", True)
    monkeypatch.setattr(extend_module, "ExtendAttention", WideExtend)
    return seen


@pytest.fixture
def hopper(launched, monkeypatch):
    """Simulates FlashInfer and a Hopper GPU."""
    monkeypatch.setattr(dense_flashinfer, "BatchPrefillWithPagedKVCacheWrapper", FlashInfer)
    monkeypatch.setattr(dense_flashinfer, "BatchPrefillWithRaggedKVCacheWrapper", FlashInfer)
    monkeypatch.setattr(dense_flashinfer, "StagingCopy", mock.Mock)
    monkeypatch.setattr(dense_flashinfer, "WORKSPACE_BYTES", 1)
    monkeypatch.setattr(dense_flashinfer.RaggedPrefill, "available", lambda device: True)
    monkeypatch.setattr(hopper_module, "supports", lambda store: True)
    monkeypatch.setattr(hopper_module, "_kernels", lambda *names: 2 * (CudaKernel(*names[:2], launched),))
    monkeypatch.setattr(extend_module, "ExtendAttention", partial(WideExtend, hopper=True))
    monkeypatch.setattr(
        DecodeAttention, "_choose_engine",
        lambda self: "triton" if self.query_rows else "gluon",
    )  # fmt: skip


def build(options, megabytes=40, device="cpu"):
    return build_runtime(
        KvcConfig(block_size=P, window=0, **options), num_bytes=megabytes << 20, layers=LAYERS, heads=HEADS,
        head_dim=DIM, dtype=torch.bfloat16, device=device,
    )  # fmt: skip


def sizes(window):
    """Sizes of attention; `window` applies to one of two layers."""
    windows = () if window < 0 else (window,)
    return dict(query_heads=HEADS * GROUP, max_batch=REQUESTS, max_blocks=COLUMNS, windows=windows)


def serve(runtime, cap, window=-1):
    """Run batched prompts, decode steps, compactions and releases of sizes unknown to the warm-up."""
    policy, gen, device = runtime.policy, random.Random(1), runtime.store.device
    default = policy.fake_quant_format(policy.format_id_of(None))
    attention = Attention(runtime.store, policy.score_sampling, default, **sizes(window))
    layers = list(enumerate((-1, window)[:LAYERS]))
    # Each block has one place, as in a server: if two programs added to the scores of one block, one result would be
    # lost.
    sampled = runtime.take([P * j for j in range(COLUMNS)])
    runtime.flush()
    for at in range(0, COLUMNS, 20):
        runtime.queue_due(sampled[at : at + 9], len(runtime.store.block_formats) - 1, length=COLUMNS * P)
        runtime.flush()
    row = torch.tensor(sampled, dtype=torch.int32, device=device)
    slots = (row[:, None] * P + torch.arange(P, dtype=torch.int32, device=device)).flatten()
    for turn in range(min(40, int(os.environ.get("KVC_TEST_REPEATS", 40)))):
        n = gen.randint(1, 5)
        # Arbitrary lengths, a few new tokens, or many over a long prefix.
        news, blocks, odd = (
            ((1, 3, 9, 25, 50, 130, 700, 1500), (0, 1, 3, 30, 90), (0, 0, 5)),
            ((1, 2, 4, 9), (1, 3, 90), (0, 1, 17)),
            ((513, 700, 1500), (0, 70, 90), (0,)),
        )[turn // 2 % 3]
        prefixes = [P * gen.choice(blocks) + gen.choice(odd) for _ in range(n)]
        new = [gen.choice(news) for _ in range(n)]
        ids = runtime.take([P * j for j in range(gen.randint(1, 9))])
        runtime.flush()
        runtime.queue_due(ids, gen.randrange(len(runtime.store.block_formats)), length=turn * P)
        runtime.flush()
        while runtime.demotion.demote(np.array(ids), 10**9):
            runtime.flush()
        if (1, 1) in policy.moves:
            runtime.blocks.ref_count[ids] = 1
            runtime.replanning.replan(ids, 900)
            runtime.flush()
        if policy.answer_format and (runtime.blocks.format_id[ids] > 1).all():
            at = np.array(ids)
            few = gen.randint(0, len(at))
            groups = np.array([[few, 1], [len(at) - few] * 2])
            runtime.queue_move(
                at, from_format=policy.unplanned_format, to_format=policy.answer_format, lengths=np.full(len(at), 900),
                groups=groups[groups[:, 0] > 0],
            )  # fmt: skip
            runtime.flush()
        if "one-shot" in offered(runtime.config):
            warm_up.one_shot(runtime.store, uncompressed := runtime.take([P * j for j in range(turn % 9 + 1)]))
            runtime.free(uncompressed)
            runtime.flush()
        if runtime.config.host_memory:
            ids = through_host_memory(runtime, ids)
        lens = [a + b for a, b in zip(prefixes, new)]
        places = torch.zeros(sum(new), dtype=torch.int64, device=device)
        levels = [gen.choice((default, None)) for _ in range(n)] if turn % 2 else None
        waiting = [[j for j in range(x // P) if gen.random() < 0.2] for x in prefixes] if default else None
        snap = Snapshot(
            row.repeat(n, 1), torch.tensor(lens, device=device), places, places, lens, prefixes, new, levels, waiting
        )
        attention.plan_extend(snap)
        if policy.collects_scores:
            attention.note(snap, torch.tensor(new, dtype=torch.int32, device=device))
        for layer, seen in layers:
            attention.extend(layer, *tensors(sum(new), device), scale=0.3, logit_cap=cap, window=seen)
        n = gen.randint(1, REQUESTS)
        lens = [gen.randint(1, COLUMNS * P) for _ in range(n)]
        table = slots.repeat(REQUESTS + 1, 1)
        at, step = torch.arange(n + 1, device=device)[1:], torch.tensor([0, *lens], device=device)[1:]
        snap = attention.plan_decode(table, at, step, lens)
        if policy.collects_scores:
            attention.note(snap, None)
        for layer, seen in layers:
            attention.decode(layer, *tensors(n, device), scale=0.3, logit_cap=cap, window=seen)
        runtime.free(ids)
        runtime.flush()
    runtime.free(sampled)
    runtime.flush()


def through_host_memory(runtime, ids):
    """The block ids of `ids` after a save to and a load from host memory."""
    if runtime.host_tier is None:
        runtime.attach_host_tier()
    stored = runtime.host_tier.save(np.array(ids))
    runtime.free(ids)
    runtime.flush()
    loading = runtime.host_tier.load(stored)
    runtime.flush()
    runtime.page_ops.synchronize()  # blocks stay until their load has ended
    assert loading.finished
    runtime.host_tier.loading.clear()
    runtime.host_tier.free(stored)
    return loading.blocks.tolist()


def tensors(n, device):
    return [torch.zeros((n, h, DIM), dtype=torch.bfloat16, device=device) for h in (HEADS * GROUP, HEADS, HEADS)]


def compare(options, cap, launched, *expected, window=-1):
    runtime = build(options)
    warm_up.warm_up(runtime, kinds={(-1, cap), (window, cap)}, **sizes(window))
    assert not runtime.blocks.used_count and not len(runtime.log)  # the server's own pool is unchanged
    ready = set(launched)
    launched.clear()
    serve(runtime, cap, window)
    assert {name for name, *_ in launched} >= {"_append_kernel", "_split_kernel", "merge_kernel", *expected}
    seen, policy = {name for name, *_ in launched}, runtime.policy
    assert ("note_kernel" in seen) == policy.collects_scores
    assert ("thresholds_kernel" in seen) == (policy.name == "leankv")
    assert ("keydiff_kernel" in seen) == isinstance(getattr(policy, "scorer", None), KeyDiff)
    assert not {(name, combination) for name, combination, _ in launched - ready}


@pytest.mark.parametrize("cap", [0.0, 30.0])
@pytest.mark.parametrize("options", CONFIGURATIONS, ids=lambda x: "-".join(map(str, x.values())))
def test_warm_up_compiles_all_kernels(options, cap, launched):
    compare(options, cap, launched, "_extend_kernel", "_decode_kernel", "merge_splits_kernel")


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=lambda x: "-".join(map(str, x.values())))
def test_warm_up_compiles_all_kernels_for_hopper(options, hopper, launched):
    staged = options["policy"] == "quantize" and options["high"] != "bf16"
    compare(options, 0.0, launched, "extend.cu", "_decode_kernel", *(["_fake_quant_kernel"] if staged else []))


WINDOWED = [x for x in CONFIGURATIONS if x["policy"] == "quantize"]


@pytest.mark.parametrize("cap", [0.0, 30.0])
@pytest.mark.parametrize("options", WINDOWED, ids=lambda x: "-".join(map(str, x.values())))
def test_warm_up_compiles_all_kernels_for_windows(options, cap, launched):
    compare(options, cap, launched, "_extend_kernel", "_decode_kernel", "window_kernel", "_unpack_kernel", window=70)


@pytest.mark.parametrize("options", WINDOWED, ids=lambda x: "-".join(map(str, x.values())))
def test_warm_up_compiles_all_kernels_for_windows_on_hopper(options, hopper, launched, monkeypatch):
    engine = property(lambda self: "triton" if self.window >= 0 or self.query_rows else "gluon", lambda *_: None)
    monkeypatch.setattr(DecodeAttention, "engine", engine, raising=False)
    compare(options, 0.0, launched, "extend.cu", "_decode_kernel", "_unpack_kernel", window=70)


def test_warm_up_ring_size_is_divisible_by_16_like_servers():
    for megabytes in range(20, 30):
        runtime = build(dict(policy="quantize", high="k4v4"), megabytes)
        small = warm_up.small_runtime(runtime)
        assert (small.store.ring.numel() - runtime.store.ring.numel()) % 16 == 0
        assert small.sizing.num_pages < 400


def test_warm_up_failure_logs_one_line(monkeypatch, caplog):
    def fail(*args, **options):
        raise RuntimeError("no memory\nand much more")

    monkeypatch.setattr(warm_up, "warm_up", fail)
    with caplog.at_level(logging.INFO):
        warm_up.compile_ahead(None, kinds={(-1, 0.0)})
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "RuntimeError: no memory)" in caplog.text and "more" not in caplog.text
    monkeypatch.setattr(warm_up, "warm_up", mock.Mock())
    with caplog.at_level(logging.INFO):
        warm_up.compile_ahead(None, kinds={(-1, 0.0)})
    assert "are ready after" in caplog.text


def test_warm_up_failure_that_breaks_gpu_ends_start(monkeypatch, caplog):
    """After an illegal address every later call fails; after a failed allocation or compilation it does not."""
    failure = mock.Mock(side_effect=RuntimeError("an illegal memory access was encountered\nand much more"))
    monkeypatch.setattr(warm_up, "warm_up", failure)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    warm_up.compile_ahead(None, kinds={(-1, 0.0)})
    assert "starts anyway" in caplog.text
    monkeypatch.setattr(torch.cuda, "synchronize", failure)
    with pytest.raises(RuntimeError, match=r"GPU is unusable.*illegal memory access") as e:
        warm_up.compile_ahead(None, kinds={(-1, 0.0)})
    assert "\n" not in str(e.value)
