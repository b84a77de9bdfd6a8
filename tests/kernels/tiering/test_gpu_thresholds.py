"""LeanKV's plan by one kernel on the GPU: the tiers that the torch reference finds on the CPU."""

import pytest
import torch

from kvc_kernels import ops
from kvc_kernels.common import bits
from kvc_kernels.formats import BF16, FORMATS
from kvc_kernels.layout import BlockFormat, PoolLayout, choose_page_bytes
from kvc_kernels.store import PageStore

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BLOCKS = torch.tensor([4, 1, 2])


@pytest.mark.parametrize("tokens", [64, 128, 256])
@pytest.mark.parametrize("alpha", [ops.Thresholds(1.0, 0.02), ops.Thresholds(3.0, 0.9), ops.Thresholds(0.0, 0.9)])
@pytest.mark.parametrize(
    "sampling", [ops.ScoreSampling(), ops.ScoreSampling(stride=16), ops.ScoreSampling(window=32)], ids=str
)
def test_same_tiers_first_and_again(sampling, alpha, tokens):
    from kvc_kernels.tiering.thresholds_kernel import plan_thresholds_triton

    formats = [FORMATS["k8v4"], FORMATS["k4v2"]]
    size = choose_page_bytes(formats, head_dim=128, block_tokens=tokens, has_scores=True)
    layout = PoolLayout(3, 8, 128, tokens, size, True)
    cpu_store = PageStore.create(
        layout, (BlockFormat(BF16), BlockFormat(*formats)), num_pages=1 + 6 * layout.block_pages_bf16, num_blocks=6,
        dtype=torch.bfloat16, device="cpu",
    )  # fmt: skip
    cpu_store.pages.zero_()
    ops.take_bf16(cpu_store, BLOCKS)
    page, gen = layout.page(BF16), torch.Generator().manual_seed(tokens)
    scores = bits.segment(page, cpu_store.pages, "scores", torch.float32)
    scores.exponential_(generator=gen).mul_(2)
    scores.copy_(torch.where(torch.rand(scores.shape, generator=gen) < 0.3, 0.25, scores))
    cpu_store.query_counts[BLOCKS] = torch.tensor([0, 37, 500], dtype=torch.int32)
    prompts = torch.full_like(BLOCKS, 2 * tokens + 21)  # ends in the last block
    for from_format, lengths in ((0, [0, 0, 3000]), (1, [9000, 7000, 0])):
        gpu_store = PageStore(**{k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in vars(cpu_store).items()})
        expected, got = (
            plan(
                store, *(x.to(store.device) for x in (BLOCKS, BLOCKS * tokens, torch.tensor(lengths), prompts)), alpha,
                sampling, from_format=from_format, to=store.block_formats[1],
            )
            for plan, store in ((ops.plan_thresholds, cpu_store), (plan_thresholds_triton, gpu_store))
        )  # fmt: skip
        assert torch.equal(got.cpu(), expected)
        ops.compact(cpu_store, BLOCKS, 1, expected, from_format=from_format)
        cpu_store.query_counts[BLOCKS] += 400
