"""Prefill attention on the GPU against float64, for every kernel that may run it."""

import pytest
import torch

from kvc_kernels.formats import BF16, FORMATS
from kvc_kernels.layout import BlockFormat
from tests.support.libraries import skip_without
from tests.support.rows import ALIGNED, LAYOUTS, laid_out

from .test_interpret import FORMAT_LISTS, error, inputs, make_case, reference
from .test_interpret_few_tokens import new_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
FORMS = {
    **FORMAT_LISTS,
    "k8v4": (BlockFormat(BF16), BlockFormat(FORMATS["k8v4"])),
    "k4v8": (BlockFormat(BF16), BlockFormat(FORMATS["k4v8"])),
    "k4v2": (BlockFormat(BF16), BlockFormat(FORMATS["k4v2"])),
}
ROWS = torch.tensor([[9, 4, 2, 7, 11, 5, 3], [1, 6, 8, 0, 0, 0, 0], [10, 2, 12, 4, 0, 0, 0], [6, 0, 0, 0, 0, 0, 0]])
PREFIX = [6 * 128 + 51, 0, 2 * 128, 7]
FORMAT_IDS = (1, 2, 0, 1, 2, 1, 0, 1, 2, 2, 1, 0)
TOLERANCE = 0.02  # error of one output row over the mean norm; bf16 outputs alone round by 0.004


def run(store, group, new, prefix=PREFIX, scale=0.09, cap=0.0, layer=1, sms=0, **options):
    """(worst row's error, output) of one plan and run on poisoned memory. `sms`: processors to cut prefixes for."""
    from kvc_kernels.extend.attention import ExtendAttention

    heads = store.layout.heads
    seed = torch.initial_seed()
    print("seed", seed)
    q, k, v = inputs(store, group, sum(new), store.dtype, seed=seed, device="cuda")
    op = ExtendAttention(store, query_heads=heads * group, max_blocks=16, **options)
    op._sms = sms or op._sms
    op.plan(ROWS[: len(new)].int().cuda(), prefix, new)
    for buffer in (op._part_o, op._part_lse):
        buffer.fill_(torch.nan)
    poison = torch.full_like(q, torch.nan)
    del poison  # the allocator hands the same memory to the output
    out = op.run(layer, q, k, v, scale=scale, logit_cap=cap)
    rows = ROWS[: len(new)]
    return error(out, reference(store, layer, q, k, v, rows, prefix, new, scale=scale, logit_cap=cap)), out


def case(form, group, head_dim=128, heads=2, dtype=torch.bfloat16, has_scores=False):
    return make_case(
        FORMS[form], group=group, head_dim=head_dim, heads=heads, block_tokens=128, dtype=dtype,
        has_scores=has_scores, format_ids=FORMAT_IDS, device="cuda", seed=torch.initial_seed(),
    )  # fmt: skip


@pytest.mark.parametrize(
    "form, group, head_dim, has_scores",
    [
        ("k4v4", 4, 128, False),
        ("k4v4", 7, 64, True),
        ("k8v8", 1, 128, False),
        ("k2v2", 3, 64, False),
        ("k2v2", 4, 128, False),
        ("tiers", 4, 128, True),
        ("tiers", 3, 64, True),
        ("plain", 4, 128, False),
    ],
)
def test_triton(form, group, head_dim, has_scores):
    store = case(form, group, head_dim, has_scores=has_scores)
    worst, _ = run(store, group, [70, 33, 1, 20])
    assert worst < TOLERANCE


@needs_hopper
@pytest.mark.parametrize(
    "form, group, new",
    [
        ("k4v4", 4, [70, 33, 1, 20]),
        ("k4v4", 4, [20, 3, 1, 9]),
        ("k4v4", 7, [40, 33, 1, 20]),
        ("k8v8", 1, [300, 33, 129, 20]),
        ("k8v4", 3, [70, 33, 1, 20]),
        ("k4v8", 4, [64, 64, 64, 64]),
        ("k4v2", 4, [70, 33, 1, 20]),
        ("k2v2", 4, [70, 33, 1, 20]),
        ("k2v2", 2, [20, 3, 1, 9]),
        ("tiers", 4, [40, 3, 1, 9]),
        ("tiers", 4, [70, 33, 1, 20]),
        ("plain", 4, [70, 33, 1, 20]),
    ],
)
def test_hopper(form, group, new):
    store = case(form, group, has_scores=form == "tiers")
    worst, _ = run(store, group, new, hopper=True)
    # Random 8-bit codes spell keys so large that logits of 50 come up, and in fp16 those are off by 0.02.
    assert worst < (1.5 if form == "k8v8" else 1) * TOLERANCE


@needs_hopper
@pytest.mark.parametrize(
    "form, group, new",
    [
        ("k4v4", 4, [16, 5, 1, 9]),
        ("k4v4", 7, [4, 2, 1, 3]),
        ("k8v8", 1, [64, 33, 1, 20]),
        ("k8v4", 3, [12, 3, 1, 9]),
        ("k4v8", 4, [16, 16, 16, 16]),
        ("plain", 4, [13, 3, 1, 9]),
    ],
)
@pytest.mark.parametrize("sms", [1, 132])
def test_hopper_few_rows(form, group, new, sms):
    store = case(form, group)
    worst, _ = run(store, group, new, sms=sms, hopper=True, dense="none")
    assert worst < TOLERANCE


@needs_hopper
def test_hopper_fp16_with_capped_logits():
    store = case("k4v4", 2, dtype=torch.float16)
    worst, _ = run(store, 2, [70, 33, 1, 20], hopper=True, scale=1.0, cap=5.0)
    assert worst < TOLERANCE


@pytest.mark.parametrize("hopper", [False, pytest.param(True, marks=needs_hopper)])
def test_same_answer_twice(hopper):
    """Nothing depends on the order in which programs run."""
    store = case("k4v4", 4)
    from kvc_kernels.extend.attention import ExtendAttention

    q, k, v = inputs(store, 4, 124, store.dtype, device="cuda")
    op = ExtendAttention(store, query_heads=8, max_blocks=16, hopper=hopper)
    op.plan(ROWS.int().cuda(), PREFIX, [70, 33, 1, 20])
    outs = [op.run(0, q, k, v, scale=0.09) for _ in range(5)]
    assert all(torch.equal(x, outs[0]) for x in outs)


@pytest.mark.parametrize("dense", ["fa3", "flashinfer"])
@pytest.mark.parametrize("hopper", [False, pytest.param(True, marks=needs_hopper)])
def test_a_library_for_the_new_tokens(hopper, dense):
    skip_without(dense)
    store = case("k4v4", 4, heads=8)
    for prefix in (PREFIX, [0, 0, 0, 0]):
        worst, _ = run(store, 4, [600, 33, 200, 1], prefix=prefix, dense=dense, hopper=hopper)
        assert worst < 1.5 * TOLERANCE  # the libraries round probabilities to bf16


@pytest.mark.parametrize("hopper", [False, pytest.param(True, marks=needs_hopper)])
@pytest.mark.parametrize(
    "dense, layouts, forwards",
    [
        ("none", LAYOUTS, ([4, 2, 1, 3], [20, 3, 1, 9], [160, 33, 129, 20], [16, 5, 1, 9])),
        ("fa3", ALIGNED, ([70, 33, 1, 20], [600, 33, 200, 1])),
    ],
)
def test_layers_of_several_forwards(dense, layouts, forwards, hopper):
    """Layers differ in the strides and addresses of their rows, in scale and in logit cap. Buffers grow."""
    from kvc_kernels.extend.attention import ExtendAttention

    skip_without(dense)
    store = case("k4v4", 4)
    op = ExtendAttention(store, query_heads=8, max_blocks=16, hopper=hopper, dense=dense)
    op._sms = 132
    kinds = [(0.09, 0.0), (0.05, 0.0), (0.05, 20.0), (0.09, 30.0), (0.09, 0.0)]
    for new in forwards:
        op.plan(ROWS.int().cuda(), PREFIX, new)
        for i, (scale, cap) in enumerate(kinds):
            rows = inputs(store, 4, sum(new), store.dtype, seed=i, device="cuda")
            q, k, v = (laid_out(x, layouts[i % len(layouts)]) for x in rows)
            out, lse = op.run(i % 2, q, k, v, scale=scale, logit_cap=cap, return_lse=True)
            want, sums = reference(store, i % 2, q, k, v, ROWS, PREFIX, new, scale=scale, logit_cap=cap, lse=True)
            assert error(out, want) < 1.5 * TOLERANCE, (new, i)
            assert (lse.cpu() - sums).abs().max() < 0.05, (new, i)


@pytest.mark.parametrize("new", [(1, 1, 1), (2, 1, 2), (4, 3, 1)])
@pytest.mark.parametrize("form, group, head_dim", [
    ("k4v4", 4, 128), ("k8v8", 1, 128), ("k2v2", 3, 64), ("k4v2", 4, 128),
    ("tiers", 2, 128), ("plain", 4, 128),
])  # fmt: skip
def test_few_new_tokens(form, group, head_dim, new):
    """The decode kernel reads them from their pages; the last blocks are uncompressed."""
    from kvc_kernels.extend.attention import ExtendAttention

    format_ids = (1, 2, 0, 1, 2, 1, 0, 1, 2, 2, 1, 0)
    store = make_case(
        FORMS[form], group=group, head_dim=head_dim, heads=8, block_tokens=128, format_ids=format_ids,
        device="cuda", seed=torch.initial_seed() % 2**31,
    )  # fmt: skip
    rows, prefix = torch.tensor([[9, 4, 2, 3], [7, 0, 0, 0], [10, 2, 12, 0]]), [3 * 128 + 9, 100, 2 * 128]
    q, *_ = inputs(store, group, sum(new), store.dtype, device="cuda")
    op = ExtendAttention(store, query_heads=8 * group, max_blocks=4, appended=True)
    op.plan(rows.int().cuda(), prefix, list(new))
    assert op.steps.prefix == "decode"
    k, v = new_rows(store, 1, rows, prefix, new)
    out, lse = op.run(1, q, k, v, scale=0.09, return_lse=True)
    want, sums = reference(store, 1, q, k, v, rows, prefix, new, scale=0.09, lse=True)
    assert error(out, want) < (1.5 if form == "k8v8" else 1) * TOLERANCE
    assert (lse.cpu() - sums).abs().max() < 0.05


def test_no_sync():
    """Planning and running never wait for the device."""
    from kvc_kernels.extend.attention import ExtendAttention

    store = case("k4v4", 4)
    q, k, v = inputs(store, 4, 71, store.dtype, device="cuda")
    op = ExtendAttention(store, query_heads=8, max_blocks=16, hopper=HOPPER)
    rows = ROWS[:2].int().cuda()
    for _ in range(2):
        op.plan(rows, PREFIX[:2], [70, 1])
        op.run(0, q, k, v, scale=0.09)
        torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")
