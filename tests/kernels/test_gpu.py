"""The same operations on a CUDA device: the same bytes, and no host sync in what a step runs."""

import numpy as np
import pytest
import torch

from kvc_kernels import ops
from kvc_kernels.store import PageStore
from tests.support.pages import TorchStore, block_formats_of, fill, make_store, random_kv, random_tiers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BLOCK_FORMATS = block_formats_of("k8v4+k4v2", "k4v4", "k2v2")


def to_cuda(store: PageStore) -> PageStore:
    fields = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in vars(store).items()}
    return TorchStore(**fields)


@pytest.mark.parametrize("has_scores", [False, True])
def test_same_bytes_as_on_the_cpu_without_sync(has_scores):
    cpu_store = make_store(BLOCK_FORMATS, layers=2, blocks=8, has_scores=has_scores)
    gpu_store = to_cuda(cpu_store)
    gen = np.random.default_rng(0)
    plans = [random_tiers(cpu_store, 2, BLOCK_FORMATS[r], gen) for r in (1, 2, 3)]
    blocks, k, v = torch.tensor([3, 5]), *random_kv(cpu_store, 64)
    at = torch.arange(64)
    writes = [(blocks[at // 32], at % 32, k[i], v[i]) for i in range(2)]
    mean_attention_scores, divisor = torch.rand(2, 2, 2, 32), torch.ones(2, 32)
    digests = []
    for store in (cpu_store, gpu_store):

        def put(x, d=store.device):
            return x.to(d)

        block_ids, steps = put(blocks), [[put(x) for x in w] for w in writes]
        tiers, s, d = [put(x) for x in plans], put(mean_attention_scores), put(divisor)
        lens = put(torch.tensor([64])), put(torch.tensor([64]))
        places = put(torch.tensor([0, 32])), put(torch.tensor([64, 64]))
        if store is gpu_store:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        try:
            ops.take_bf16(store, block_ids)
            for layer, w in enumerate(steps):
                ops.append(store, layer, *w)
            got = []
            if has_scores:
                ops.count_queries(store, block_ids.view(1, 2), *lens, ops.ScoreSampling())
                got.append(ops.mean_attention_scores(store, block_ids, *places, ops.ScoreSampling(), format_id=0))
            got.append(ops.quota(s, 4, 32))
            ceiling = ops.block_tiers(store, block_ids, format_id=0)
            got.append(ops.threshold(s, d, 0.7, 0.3, ceiling, 16, 32, ops.block_head_pages(store, block_ids)))
            for r in (1, 2, 3):
                got.append(ops.compact(store, block_ids, r, tiers[r - 1], from_format=r - 1))
            ops.release(store, block_ids[:1])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        ops.check_invariants(store)
        digests.append(([x.tolist() for x in got], ops.block_digest(store, 5), store.cursor.tolist()))
    assert digests[0] == digests[1]


@pytest.mark.parametrize("spec", ["k4v4", "k8v4+k4v2"])
def test_attention_agrees_with_the_cpu(spec):
    cpu_store = make_store(block_formats_of(spec), block_tokens=64, head_dim=64, blocks=8, has_scores=True)
    row = torch.tensor([4, 1, 7])
    fill(cpu_store, row, *random_kv(cpu_store, 170))
    tiers = random_tiers(cpu_store, 2, cpu_store.block_formats[1], np.random.default_rng(0))
    ops.compact(cpu_store, row[:2], 1, tiers, from_format=0)
    gpu_store = to_cuda(cpu_store)
    q = torch.randn(30, 6, 64)
    outs = []
    for s in (cpu_store, gpu_store):
        x, r = q.to(s.device), row[None].to(s.device)
        kw = {"scale": 0.125, "sampling": ops.ScoreSampling(decode_stride=1)}
        outs.append(
            (
                ops.extend_attention(s, 0, x, r, [140], [30], **kw).cpu(),
                ops.decode_attention(s, 0, x[:1], r, torch.tensor([170], device=s.device), **kw).cpu(),
                ops.block_scores(s, row.to(s.device)).cpu(),
            )
        )
    for a, b in zip(*outs):
        assert torch.allclose(a, b, atol=1e-3, rtol=1e-3)
