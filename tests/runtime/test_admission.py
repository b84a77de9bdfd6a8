"""Admission of waiting prompts by SGLang's own `PrefillAdder` with our hooks around it, over the real ledger."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
from sglang.srt import runtime_context
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

from kvc_patches.admission import around_add_chunked_req, around_add_one_req, around_init, around_running_offset
from kvc_patches.requests import before_add_request_to_queue
from kvc_patches.scheduler import around_check_decode_mem, around_get_new_batch_prefill
from sglang_kvc.adapter import waiting_queue
from sglang_kvc.adapter.request_limits import longest_request
from sglang_kvc.cache.one_shot import Budget
from sglang_kvc.cache.running_share import PATIENCE
from sglang_kvc.options.request_quality import LOSSLESS

from .model import P, ToyServer

CHUNK = 2 * P
LEANKV = {"policy": "leankv", "high": "k8v4", "low": "k4v2"}


@pytest.fixture(autouse=True)
def configured():
    """Provides the server options that the adder reads."""
    with runtime_context.get_context().override_server_args(device="cpu", chunked_prefill_size=CHUNK):
        yield


def prompt(
    server: ToyServer, new: int, answer: int, level: str | None = None, budget: Budget | None = None
) -> MagicMock:
    """One of SGLang's requests, without any cached prefix."""
    req = MagicMock(
        full_untruncated_fill_ids=array("q", [0] * new), extra_key=None, cache_salt=None, prefix_len=0, output_ids=[],
        host_hit_length=0, kvc_level=level, kvc_budget=budget, last_node=server.tree.root_node.id,
        kvc=server.runtime.new_sequence(),
    )  # fmt: skip
    req.sampling_params.max_new_tokens, req.sampling_params.ignore_eos = answer, False
    req.needs_host_load_back.return_value = False
    type(req).extend_len = property(lambda self: self.extend_end - self.prefix_len)
    return req


def adder(
    server: ToyServer, chunk: int | None = CHUNK, running=None, ratio: float = 1.0, mixed: int = 0
) -> PrefillAdder:
    chosen = PrefillAdder.__new__(PrefillAdder)
    init = PrefillAdder.__init__
    around_init(init, chosen, P, server.tree, server.allocator, running, ratio, 1 << 20, chunk, mixed)
    return chosen


def comes_in(server: ToyServer, req: MagicMock, **options) -> bool:
    chosen = adder(server, **options)
    before = chosen.memory_budget.total_offset
    result = around_add_one_req(PrefillAdder.add_one_req, chosen, req, False, None)
    if result == AddReqResult.NO_TOKEN and not chosen.can_run_list:
        assert chosen.memory_budget.total_offset == before
        return False
    assert chosen.can_run_list == [req] and chosen.memory_budget.total_offset > before
    return True


def test_prompt_waits_for_its_packed_size():
    """Eight blocks are free. A prompt of ten blocks takes four (two chunks), one open block, and five blocks packed to
    a quarter."""
    server = ToyServer(high="k4v4", window=0)
    server.runtime.take([0] * (server.runtime.capacity.available_tokens() // P - 8))
    assert comes_in(server, prompt(server, 10 * P, 10))
    assert not comes_in(server, prompt(server, 10 * P, 10, level=LOSSLESS))
    # A one-shot prompt is uncompressed until it is complete, and its answer needs a block.
    assert not comes_in(server, prompt(server, 8 * P, 10, budget=Budget(ratio=8)))
    assert comes_in(server, prompt(server, 6 * P, 10, budget=Budget(ratio=8)))
    assert not comes_in(server, prompt(server, 10 * P, 10), chunk=None)
    assert comes_in(server, prompt(server, 2 * P, 10 * P), chunk=None)  # an answer is packed while it grows
    server.runtime.take([0] * 2)
    assert not comes_in(server, prompt(server, 10 * P, 10))


def test_prompt_that_is_planned_at_end_waits_for_its_size_in_the_high_format():
    """Eight blocks are free. Two chunks and the open block take five, the other blocks all pages of k8v4."""
    server = ToyServer(**LEANKV, window=0)
    capacity, formats = server.runtime.capacity, server.runtime.store.block_formats
    high = formats[2].pages / server.runtime.layout.block_pages_bf16
    assert capacity.prompt_tokens(8 * P, 0, 1, CHUNK) == (5 + 3 * high) * P
    server.runtime.take([0] * (capacity.available_tokens() // P - 8))
    assert comes_in(server, prompt(server, 8 * P, 10))
    assert not comes_in(server, prompt(server, 10 * P, 10))
    assert not comes_in(server, prompt(server, 8 * P, 10), chunk=None)
    assert comes_in(server, prompt(server, 6 * P, 10), chunk=None)


def test_prompt_waits_for_open_blocks_of_window():
    """A long answer to a short prompt: all six blocks of the window stay uncompressed, and one more is open."""
    server = ToyServer(high="k4v4", window=6 * P)
    runtime = server.runtime
    ratio = runtime.store.block_formats[1].pages / runtime.layout.block_pages_bf16
    assert runtime.capacity.prompt_tokens(P, 20 * P, 1, CHUNK) == (1 + 6 + 14 * ratio) * P
    assert runtime.capacity.prompt_tokens(6 * P, 20 * P, 1, CHUNK) == (6 + 1 + 19 * ratio) * P
    seq, chosen = runtime.new_sequence(), SimpleNamespace(token_to_kv_pool_allocator=server.allocator)
    seq.extend(runtime.take([0, P]))
    running = SimpleNamespace(kvc=seq, kvc_level=None, sampling_params=SimpleNamespace(ignore_eos=False))
    assert around_running_offset(lambda self, req: 10 * P, chosen, running) == (5 + 5 * ratio) * P
    # After a cached prefix: the window does not unpack its blocks.
    prefix = runtime.take([0, P])
    assert runtime.queue_due(prefix) == 2
    running.kvc = runtime.new_sequence(np.array(prefix), 2 * P)
    running.kvc.extend(runtime.take([2 * P]))
    assert around_running_offset(lambda self, req: 10 * P, chosen, running) == (6 + 4 * ratio) * P


@pytest.mark.parametrize("share", [1.0, 0.5, 0.1])
def test_prompt_that_needs_eviction_waits_for_running_requests(share):
    """Running requests hold a quarter of the memory. A prompt of ten blocks needs an eviction, and takes another fifth
    when it is packed."""
    server = ToyServer(high="k4v4", window=0, running_share=share)
    runtime, capacity, first = server.runtime, server.runtime.capacity, 0
    while capacity.available_tokens() > 8 * P:
        server.finish(server.admit([*range(first, first + 4 * P), 1]))
        first += 4 * P
    runtime.take([0] * 4)
    held = 1 - runtime.ledger.reachable / runtime.ledger.limit
    assert 0.2 < held < 0.3 and runtime.ledger.idle_blocks
    decoding = prompt(server, 0, 1)
    running = SimpleNamespace(reqs=[decoding], is_empty=lambda: False)

    def waits(blocks: int, running=running, **changes) -> bool:
        req = prompt(server, blocks * P, 1)
        req.kvc_waits_for = changes.get("waits_for")
        req.kvc_crowded_since = runtime.running_share.admitted - changes.get("passed", 0)
        chosen = adder(server, running=running, ratio=0.0)
        return around_add_one_req(PrefillAdder.add_one_req, chosen, req, False, None) == AddReqResult.NO_TOKEN

    assert waits(10) is (share == 0.1)
    assert not waits(1)  # fits in free memory
    assert not waits(10, running=None)  # nothing else runs
    assert not waits(10, waits_for=3)  # its blocks are being loaded
    assert waits(10, passed=PATIENCE - 1) is (share == 0.1)
    assert not waits(10, passed=PATIENCE)  # other prompts were admitted long enough


@pytest.mark.parametrize("at_border", [False, True])
def test_prefill_leaves_blocks_for_mixed_decode_step(at_border):
    """Three blocks are free. A prompt or a chunk of one block leaves two: not enough for three requests that decode at
    the end of a block."""
    server = ToyServer(high="k4v4", window=0)
    runtime = server.runtime
    decoding = [prompt(server, 0, 1) for _ in range(3)]
    for req in decoding:
        assert runtime.grow([req.kvc], [P if at_border else P - 1])
    runtime.take([0] * (runtime.capacity.available_tokens() // P - 3))
    running = SimpleNamespace(reqs=decoding, is_empty=lambda: False)
    options = {"running": running, "ratio": 0.0, "mixed": len(decoding)}
    assert adder(server, **options).rem_chunk_tokens == CHUNK - P
    assert comes_in(server, prompt(server, P, 1), **options) is not at_border
    chosen, req = adder(server, **options), prompt(server, CHUNK, 1)
    around_add_chunked_req(PrefillAdder.add_chunked_req, chosen, req)
    assert bool(chosen.can_run_list) is not at_border


@pytest.mark.parametrize("fraction", [0.0, 0.5])  # of a token, of the reserve for packed answers
@pytest.mark.parametrize(("free", "chunk_tokens"), [(5, CHUNK), (3, CHUNK), (2, P), (1, None)])
def test_chunk_is_cut_to_leave_block_for_running_requests(free, chunk_tokens, fraction):
    """The reserve for the running request's long answer is more than what is free. A chunk of two blocks draws on it,
    is shortened if it would leave no block for the running request, and waits if it does not fit at all."""
    server = ToyServer(high="k4v4", window=0)
    server.runtime.take([0] * (server.runtime.capacity.available_tokens() // P - free))
    answering = prompt(server, 0, 40 * P)
    running = SimpleNamespace(reqs=[answering], is_empty=lambda: False)
    chosen, req = adder(server, running=running), prompt(server, 6 * P, 10)
    chosen.memory_budget.total_offset += fraction
    if free == 2:  # the reserve leaves one block
        chosen.memory_budget.total_offset = P
    again = around_add_chunked_req(PrefillAdder.add_chunked_req, chosen, req)
    assert again is req
    assert [r.extend_end - r.prefix_len for r in chosen.can_run_list] == ([chunk_tokens] if chunk_tokens else [])
    if not chunk_tokens:  # no prompt that would fit is admitted or started ahead of the one that waits
        server.runtime.free(list(range(1, 11)))
        chosen.memory_budget.total_offset = 0
        for new in (5, 6 * P):
            around_add_one_req(PrefillAdder.add_one_req, chosen, prompt(server, new, 1), True, None)
        assert not chosen.can_run_list and chosen.new_chunked_req is None


def test_growth_handles_finished_request():
    """SGLang asks for the growth of every request in the batch, including one whose blocks have already been freed."""
    server = ToyServer(high="k4v4")
    adder = SimpleNamespace(token_to_kv_pool_allocator=server.allocator)
    sampling = SimpleNamespace(ignore_eos=False)
    ended = [SimpleNamespace(kvc=None, kvc_level=level, sampling_params=sampling) for level in (None, LOSSLESS)]
    rooms = [around_running_offset(lambda self, req: 10 * P, adder, req) for req in ended]
    assert rooms[0] < rooms[1] == 10 * P


def test_answer_of_fixed_length_is_reserved_by_ratio(monkeypatch):
    """Six blocks are free. The running request writes 20 more, packed to a quarter: its reserve leaves no room for a
    prompt of one block, unless it is expected to write a tenth of them before memory comes free."""
    name = "_get_running_request_total_token_offset"
    orig = getattr(PrefillAdder, name)
    monkeypatch.setattr(PrefillAdder, name, lambda self, req: around_running_offset(orig, self, req))
    server = ToyServer(high="k4v4", window=0)
    server.runtime.take([0] * (server.runtime.capacity.available_tokens() // P - 6))
    for fixed in (False, True):
        answering = prompt(server, 0, 20 * P)
        answering.sampling_params.ignore_eos = fixed
        running = SimpleNamespace(reqs=[answering], is_empty=lambda: False)
        assert not comes_in(server, prompt(server, P, 1), running=running, ratio=1.0)
        assert comes_in(server, prompt(server, P, 1), running=running, ratio=0.1)


@pytest.mark.parametrize("fixed", [False, True])
def test_prefetch_leaves_expected_answers_their_memory(fixed):
    """Prefetching counts the growth of running and admitted requests by the new-token ratio, each request once."""
    server = ToyServer(high="bf16")
    running, admitted = prompt(server, 0, 20 * P), prompt(server, 0, 10 * P)
    running.sampling_params.ignore_eos = admitted.sampling_params.ignore_eos = fixed
    scheduler = SimpleNamespace(
        tree_cache=server.tree, token_to_kv_pool_allocator=server.allocator, chunked_req=admitted,
        new_token_ratio_tracker=SimpleNamespace(current=0.5),
    )  # fmt: skip
    plan = SimpleNamespace(running_batch=SimpleNamespace(reqs=[running]), batch_to_run=SimpleNamespace(reqs=[admitted]))
    free = server.allocator.available_size()
    assert waiting_queue._unclaimed_tokens(scheduler, server.runtime, plan) == free - 15 * P


def test_full_batch_is_rechecked_after_block_is_freed_or_ratio_falls():
    server, looked = ToyServer(high="k4v4"), []
    tracker = SimpleNamespace(current=0.7)
    scheduler = SimpleNamespace(
        token_to_kv_pool_allocator=server.allocator, enable_priority_preemption=False, chunked_req=None,
        new_token_ratio_tracker=tracker,
    )  # fmt: skip
    running = [object()]
    batch = SimpleNamespace(batch_is_full=False, reqs=[], is_empty=lambda: not running)

    def refused(self, batch):
        looked.append(not batch.batch_is_full)
        batch.batch_is_full = True
        return SimpleNamespace(running_batch=batch, batch_to_run=None)

    def look() -> bool:
        around_get_new_batch_prefill(refused, scheduler, batch)
        return looked[-1]

    seq = server.runtime.new_sequence()
    seq.extend(server.runtime.take([i * P for i in range(4)]))
    seq.fill(4 * P)
    assert [look(), look()] == [True, False]
    server.runtime.queue_due(seq.slide(4 * P))
    assert [look(), look()] == [True, False]
    more = server.runtime.take([4 * P])
    assert not look()
    server.runtime.free(more)
    assert not look()  # no more is free than at the last refusal
    tracker.current = 0.6
    assert [look(), look()] == [True, False]
    running.clear()
    assert look()  # SGLang itself would never check again: no request is running that could end
    scheduler.chunked_req = object()
    assert not look()


def test_prompt_that_never_fits_is_aborted(monkeypatch):
    """Prompts of embedding models; packing makes room for prompts longer than what fits uncompressed."""
    server = ToyServer(high="k4v4", window=0)
    capacity = server.runtime.sizing.capacity_tokens
    monkeypatch.setattr("sglang_kvc.cache.runtime.current", lambda: server.runtime)
    server.runtime.generates = False

    def aborted(tokens, level=None):
        messages = []
        req = SimpleNamespace(
            origin_input_ids=[0] * tokens, sampling_params=SimpleNamespace(custom_params=level and {"kvc": level}),
            extra_key=None, session=None, session_id=None, to_finish=None, set_finish_with_abort=messages.append,
            return_routed_experts=False, return_logprob=False, lora_id=None,
            return_hidden_states=False, input_embeds=None, positional_embed_overrides=None, multimodal_inputs=None,
        )  # fmt: skip
        before_add_request_to_queue(SimpleNamespace(), req)
        return messages

    assert not aborted(capacity + 2 * P)
    assert f"{10 * capacity} tokens does not fit" in aborted(10 * capacity)[0]
    # An empty server admits or aborts every length: a prompt with neither outcome would wait forever
    # and block all requests after it.
    longest = next(n for n in range(capacity, 10 * capacity) if aborted(n))
    lengths = range(capacity - 3 * P, longest + 2 * P)
    assert len(lengths) > 3 * P
    assert [n for n in lengths if bool(aborted(n)) == comes_in(server, prompt(server, n, 0))] == []
    # A one-shot prompt stays uncompressed until it is complete or thinned.
    for budget in (Budget(ratio=8), Budget(tokens=3 * P)):
        longest = server.runtime.capacity.one_shot.longest(budget, 1, CHUNK)
        assert longest > capacity + 2 * P
        lengths = [*range(capacity - 3 * P, capacity + P), *range(longest - P, longest + P)]
        refused = [bool(aborted(n, level=str(budget))) for n in lengths]
        assert refused == [not comes_in(server, prompt(server, n, 0, budget=budget)) for n in lengths]
        assert refused == [n > longest for n in lengths]


def test_bootstrap_host_does_not_keep_request_out_of_tree(monkeypatch):
    """SGLang keeps a request with this `bootstrap_host` out of the tree. Chunks advance by what the tree holds, so a
    prompt longer than a chunk would compute its first chunk forever."""
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    server = ToyServer(high="k4v4")
    monkeypatch.setattr("sglang_kvc.cache.runtime.current", lambda: server.runtime)
    req = Req("r", "", array("q", range(5)), SamplingParams(), bootstrap_host=FAKE_BOOTSTRAP_HOST)
    assert req.skip_radix_cache_insert
    before_add_request_to_queue(SimpleNamespace(), req)
    assert not req.skip_radix_cache_insert


BATCH = SimpleNamespace(reqs=[None] * 1000)  # more requests than there are blocks


def test_decode_memory_check_skips_count_when_blocks_suffice(monkeypatch):
    """SGLang loops over all requests to count the blocks that a step takes. It still does so when a block is
    missing."""
    runtime = ToyServer(high="bf16").runtime
    monkeypatch.setattr("sglang_kvc.cache.runtime.current", lambda: runtime)
    blocks, calls = runtime.capacity.available_tokens() // P, []

    def stock(batch, selected_indices):
        calls.append(len(batch.reqs))
        return True

    for n in (blocks, blocks + 1):
        assert around_check_decode_mem(stock, SimpleNamespace(reqs=[None] * n))
    assert calls == [blocks + 1]


def test_retraction_waits_for_queued_compactions(monkeypatch):
    """The result depends on the data: until compactions have run, their blocks are charged the maximum that they may
    take."""
    server = ToyServer(policy="leankv", high="k8v4", low="k4v2", window=0)
    runtime = server.runtime
    monkeypatch.setattr("sglang_kvc.cache.runtime.current", lambda: runtime)
    blocks = runtime.take([i * P for i in range(runtime.capacity.available_tokens() // P)])
    runtime.flush()
    runtime.queue_due(blocks)
    queued = runtime.capacity.available_tokens()

    def fits(batch, selected_indices):
        return runtime.capacity.available_tokens() > queued

    assert not runtime.pending and not fits(None, None)
    assert around_check_decode_mem(fits, BATCH)
    assert not runtime.unsettled


def test_retraction_does_not_wait_when_nothing_can_be_freed(monkeypatch):
    """Memory freed by compactions of known size is credited when they are queued."""
    server = ToyServer(high="k4v4", window=0)
    runtime = server.runtime
    monkeypatch.setattr("sglang_kvc.cache.runtime.current", lambda: runtime)
    runtime.queue_due(runtime.take([0, P]))
    assert not around_check_decode_mem(lambda batch, selected_indices: False, BATCH)
    assert runtime.unsettled


@pytest.mark.parametrize(("policy", "format_id"), [({"high": "bf16"}, 0), (LEANKV, 1), ({"high": "k4v4"}, 1)])
def test_empty_server_admits_longest_request(policy, format_id):
    """The limit lies a few blocks below the shortest length that is not admitted. With `leankv` a block of an answer
    may take a page per head more than one of a prompt, and the limit counts all tokens as an answer's."""
    server = ToyServer(window=0, **policy)
    capacity = server.runtime.sizing.capacity_tokens
    longest = longest_request(server.runtime, format_id)
    least = {"bf16": capacity - 2 * P, "k8v4": 1.1 * capacity, "k4v4": 2 * capacity}[policy["high"]]
    assert longest > least and (format_id or longest < capacity)
    for answer in (1, P):
        assert comes_in(server, prompt(server, longest - answer, answer))
        more = (8 if policy["high"] == "k8v4" else 5) * P
        assert not comes_in(server, prompt(server, longest - answer + more, answer))


@pytest.mark.parametrize("chunks_prompts", [True, False])
def test_longest_request_is_admitted_if_scheduler_ignores_chunks(chunks_prompts):
    """SGLang never chunks prompts of some models, whatever the option says. A longer prompt would block the queue."""
    server = ToyServer(high="k4v4", window=0)
    server.runtime.chunks_prompts = chunks_prompts
    longest = longest_request(server.runtime, 1)
    assert (longest > server.runtime.sizing.capacity_tokens) is chunks_prompts
    assert comes_in(server, prompt(server, longest - 2, 1), chunk=CHUNK if chunks_prompts else None)
