"""Column sums on the GPU against the scores of the torch reference on the same GPU."""

import copy

import pytest
import torch

from kvc_kernels import ops
from kvc_kernels.formats import BF16, FORMATS
from kvc_kernels.layout import BlockFormat, PoolLayout, choose_page_bytes
from kvc_kernels.store import PageStore

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PREFIX, NEW = [900, 0, 256], [77, 300, 130]
ROWS = torch.tensor([[12, 1, 4, 6, 9, 3, 2, 8], [5, 7, 10, 0, 0, 0, 0, 0], [13, 11, 14, 15, 0, 0, 0, 0]])


def captured(step):
    """The result of `step` under capture by a CUDA graph, and a function that replays the graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return out, graph.replay


@pytest.mark.parametrize(
    "sampling",
    [
        ops.ScoreSampling(),
        ops.ScoreSampling(64),
        ops.ScoreSampling(8, "sum", power=2),
        ops.ScoreSampling(None, "sum", 2, skip=10, stride=16),
    ],
)
@pytest.mark.parametrize(
    "high, low, group, head_dim",
    [("k4v4", None, 4, 128), ("k8v4", "k4v2", 7, 64), ("k8v4", "k4v2", 1, 128)],
)
def test_scores_with_the_kernels_own_lse(high, low, group, head_dim, sampling):
    from kvc_kernels.compact.launch import compact_triton
    from kvc_kernels.extend.attention import ExtendAttention
    from kvc_kernels.scores.prefill_kernel import AttentionScores

    heads, p = 2, 128
    formats = [FORMATS[x] for x in (high, low) if x]
    page = choose_page_bytes(formats, head_dim=head_dim, block_tokens=p, has_scores=True)
    layout = PoolLayout(2, heads, head_dim, p, page, True)
    block_formats = (BlockFormat(BF16), BlockFormat(formats[0], formats[1] if low else None))
    store = PageStore.create(
        layout, block_formats, num_pages=1 + 40 * layout.block_pages_bf16, num_blocks=20, dtype=torch.bfloat16,
        device="cuda"
    )
    seed = torch.initial_seed()
    print("seed", seed)
    gen = torch.Generator(device="cuda").manual_seed(seed)
    rows = ROWS.int().cuda()
    new_k, new_v = [], []
    for r in range(3):
        total = PREFIX[r] + NEW[r]
        blocks = rows[r, : -(-total // p)].long()
        ops.take_bf16(store, blocks)
        at = torch.arange(total, device="cuda")
        for layer in range(2):
            k, v = torch.randn((2, total, heads, head_dim), generator=gen, device="cuda").bfloat16()
            ops.append(store, layer, blocks[at // p], at % p, k, v)
        new_k.append(k[PREFIX[r] :])
        new_v.append(v[PREFIX[r] :])
    full = torch.cat((rows[0, :7], rows[2, :2])).long()
    tiers = torch.randint(0, 3, (9, 2, heads, p), generator=gen, device="cuda").to(torch.int8)
    compact_triton(store, full, 1, tiers, from_format=0)
    q = torch.randn((sum(NEW), heads * group, head_dim), generator=gen, device="cuda").bfloat16()
    scale = head_dim**-0.5
    kernel_store = copy.copy(store)
    kernel_store.pages = store.pages.clone()
    expected = ops.extend_attention(store, 1, q, rows, PREFIX, NEW, scale=scale, sampling=sampling)
    attend = ExtendAttention(kernel_store, query_heads=heads * group)
    attend.plan(rows, PREFIX, NEW)
    out, lse = attend.run(1, q, torch.cat(new_k), torch.cat(new_v), scale=scale, return_lse=True)
    assert (out - expected).float().norm() < 0.02 * expected.float().norm()
    op = AttentionScores(kernel_store, query_heads=heads * group, sampling=sampling)
    op.plan(rows, PREFIX, NEW)
    op.add(1, q, lse, scale=scale)
    blocks = ROWS.flatten().unique()[1:].cuda()
    a, b = (ops.block_scores(s, blocks) for s in (store, kernel_store))
    assert a[:, 1].max() > 1e-3
    assert torch.allclose(a, b, atol=5e-3 * float(a.max()), rtol=0.03)


@pytest.mark.parametrize("reduce", ["max", "squares", "worst"])
@pytest.mark.parametrize("spec, group", [("k4v4", 4), ("k8v4+k4v2", 7)])
def test_scores_of_a_captured_decode_step(spec, group, reduce):
    """Two replays of one CUDA graph collect twice what the reference finds in one step; blocks are shared."""
    from kvc_kernels.decode.attention import DecodeAttention
    from kvc_kernels.scores.prefill_kernel import AttentionScores

    from .test_interpret import ROWS as SHARED
    from .test_interpret import SCALE, TOTAL, packed_case, queries

    store, kernel_store = (
        PageStore(**{n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in vars(s).items()})
        for s in packed_case(spec)
    )
    q, sampling = queries(3, 2 * group).cuda(), ops.ScoreSampling(reduce=reduce, decode_stride=1)
    rows, lens = SHARED.cuda(), torch.tensor(TOTAL, dtype=torch.int32, device="cuda")
    for _ in range(2):
        ops.decode_attention(store, 1, q, rows, lens, scale=SCALE, sampling=sampling)
    attend = DecodeAttention(kernel_store, max_batch=3, max_blocks=4, query_heads=2 * group)
    op = AttentionScores(kernel_store, query_heads=2 * group, sampling=sampling, max_batch=3, max_blocks=4)
    lse = torch.empty((3, 2 * group), device="cuda")
    pages = kernel_store.pages.clone()

    def step():
        attend.run(1, q, scale=SCALE, lse=lse)
        op.add(1, q, lse, scale=SCALE)

    attend.plan(rows, lens)
    op.plan_decode(rows, lens)
    _, replay = captured(step)
    kernel_store.pages.copy_(pages)
    replay()
    replay()
    blocks = SHARED.flatten().unique().long()
    blocks = blocks[store.format_id.cpu()[blocks] >= 0].cuda()
    a, b = (ops.block_scores(s, blocks) for s in (store, kernel_store))
    assert a[:, 1].max() > 0.02
    assert torch.allclose(a, b, atol=5e-3 * float(a.max()), rtol=0.03)


@pytest.mark.parametrize("reduce", ["max", "sum"])
def test_a_captured_step_serves_later_ones(reduce):
    """All that a layer runs while attention is collected, as a server captures it."""
    from tests.engine.test_interpret import replays


    replays(captured, ops.ScoreSampling(reduce=reduce, decode_stride=1 if reduce == "max" else 2), "cuda")


@pytest.mark.parametrize("spec, group", [("k4v4", 4), ("k8v4+k4v2", 7)])
def test_recurrence_words_of_a_prefill_and_a_step(spec, group):
    """Words are as the reference's, except where a probability is within 10 % of the threshold."""
    from kvc_kernels.decode.attention import DecodeAttention
    from kvc_kernels.scores.prefill_kernel import AttentionScores

    from .test_interpret import ALPHA, NEW, PREFIX, SCALE, TOTAL, lse_of, packed_case, queries
    from .test_interpret import ROWS as SHARED

    rows, lens = SHARED.cuda(), torch.tensor(TOTAL, dtype=torch.int32, device="cuda")
    results = []
    for alpha in (0.9 * ALPHA, ALPHA, 1.1 * ALPHA):
        sampling = ops.ScoreSampling(reduce="recurrence", decode_stride=1, alpha=alpha)
        stores = packed_case(spec)
        q = queries(sum(NEW), 2 * group)
        prompt_lse = lse_of(stores[0], 1, q, TOTAL, PREFIX, 0.0).cuda()
        store, mine = (
            PageStore(**{n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in vars(s).items()}) for s in stores
        )
        q = q.cuda()
        op = AttentionScores(mine, query_heads=2 * group, sampling=sampling, max_batch=3, max_blocks=4)
        ops.extend_attention(store, 1, q, rows, PREFIX, NEW, scale=SCALE, sampling=sampling)
        op.plan(rows, PREFIX, NEW)
        op.add(1, q, prompt_lse, scale=SCALE)
        q, lse = q[:3].contiguous(), torch.empty((3, 2 * group), device="cuda")
        ops.decode_attention(store, 1, q, rows, lens, scale=SCALE, sampling=sampling)
        attend = DecodeAttention(mine, max_batch=3, max_blocks=4, query_heads=2 * group)
        attend.plan(rows, lens)
        attend.run(1, q, scale=SCALE, lse=lse)
        op.plan_decode(rows, lens)
        op.add(1, q, lse, scale=SCALE)
        blocks = SHARED.flatten().unique().long()
        blocks = blocks[store.format_id.cpu()[blocks] >= 0].cuda()
        results.append([ops.block_scores(s, blocks).view(torch.int32) for s in (store, mine)])
    (low, _), (want, got), (high, _) = results
    sure = low == high
    assert sure[:, 1].float().mean() > 0.5 and torch.equal(want[sure], got[sure])
    assert got[:, 1].max() > 0


@pytest.mark.parametrize("kernel", [False, True])
def test_queries_are_counted_without_waiting(kernel):
    """The lengths are on the device, as the backend passes them."""
    from kvc_kernels.scores.count_kernel import count_queries_triton

    from .test_interpret import ROWS as SHARED
    from .test_interpret import TOTAL, packed_case

    store, _ = packed_case("k4v4")
    lens, seen = torch.tensor(TOTAL, dtype=torch.int32), ops.ScoreSampling(decode_stride=1)
    ops.count_queries(store, SHARED, lens, None, seen)
    counts = torch.zeros_like(store.query_counts).cuda()
    want, store.query_counts, rows, lens = store.query_counts, counts, SHARED.cuda(), lens.cuda()
    store.pages = store.pages.cuda()
    note = count_queries_triton if kernel else ops.count_queries.reference
    if kernel:  # compiled beforehand, which may wait
        note(store, rows, lens, None, seen)
        counts.zero_()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        note(store, rows, lens, None, seen)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(counts.cpu(), want)
