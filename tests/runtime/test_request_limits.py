"""The longest request of each level: what the server reports, refuses, truncates and cuts."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from sglang.srt import runtime_context
from sglang.srt.managers.utils import validate_input_length

from kvc_patches.limits import INPUT, LENGTH, around_get_worker_info, around_validate_input_length, longest_prompts
from kvc_patches.requests import before_add_request_to_queue
from sglang_kvc.adapter.request_limits import longest_request
from sglang_kvc.cache.one_shot import Budget
from sglang_kvc.options.request_quality import LOSSLESS

from .model import P, ToyServer


@pytest.fixture(autouse=True)
def configured():
    """Provides the server options that the limits read."""
    with runtime_context.get_context().override_server_args(device="cpu", chunked_prefill_size=2 * P):
        yield


def arriving(prompt: int, answer: int = 1, level=None) -> SimpleNamespace:
    """One of SGLang's requests before it enters the queue. Its `messages` say why it was refused."""
    params = SimpleNamespace(custom_params=level and {"kvc": level}, max_new_tokens=answer, min_new_tokens=answer)
    req = SimpleNamespace(
        origin_input_ids=[0] * prompt, sampling_params=params, extra_key=None, to_finish=None, lora_id=None,
        session=None, session_id=None, messages=[], return_routed_experts=False, return_logprob=False,
        return_hidden_states=False, input_embeds=None, positional_embed_overrides=None,
        multimodal_inputs=None,
    )  # fmt: skip
    req.set_finish_with_abort = req.messages.append
    return req


def enter(prompt: int, answer: int, level=None) -> tuple[list[str], int, int]:
    """The reasons for which a request is refused when it enters the queue, and the bounds of its answer."""
    req = arriving(prompt, answer, level)
    before_add_request_to_queue(SimpleNamespace(), req)
    return req.messages, req.sampling_params.max_new_tokens, req.sampling_params.min_new_tokens


def test_worker_reports_longest_request(monkeypatch):
    """It is the limit of the format that takes the least memory, or the model's own."""
    from sglang.srt.managers import tp_worker

    stock_info = (1000, 16384, 8, None, 999, 994, 42)
    worker = MagicMock(**{"model_config.context_len": 1000}, dllm_algorithm=None)
    worker.model_runner.effective_logical_max_total_num_tokens = 2000
    worker.model_runner.token_to_kv_pool_allocator = None
    with monkeypatch.context() as patched:
        patched.setattr(tp_worker, "get_schedule", MagicMock())
        actual = tp_worker.TpModelWorker.get_worker_info(worker)  # the positions in the tuple are SGLang's
    assert (actual[LENGTH], actual[INPUT]) == (999, 994) and len([x for x in actual if isinstance(x, int)]) == 2
    monkeypatch.setattr("sglang_kvc.cache.runtime._current", None)
    assert around_get_worker_info(lambda self: stock_info, worker) == stock_info
    runtime = ToyServer(high="k4v4", levels=("k8v8",)).runtime
    monkeypatch.setattr("sglang_kvc.cache.runtime._current", runtime)
    longest = longest_request(runtime, 1)
    assert longest > max(longest_request(runtime, 2), runtime.sizing.capacity_tokens)
    for context, limit, too_long, generates in ((100, 99, 94, False), (100_000, longest, longest - 1, True)):
        worker.model_config.context_len, worker.model_config.is_generation = context, generates
        info = around_get_worker_info(lambda self: stock_info, worker)
        assert info == (*stock_info[:4], limit, too_long, 42)
        assert longest_prompts(runtime)["default"] == too_long - 1
        assert runtime.generates is generates
    # One-shot prompts, which a server without a window offers, may be longer still.
    runtime = ToyServer(high="k4v4", window=0).runtime
    monkeypatch.setattr("sglang_kvc.cache.runtime._current", runtime)
    worker.model_config.context_len = 100_000
    limits = longest_prompts(runtime)
    assert limits["default"] == longest_request(runtime, 1) - 2 and limits["default"] < limits["one-shot:64x"]
    assert limits["one-shot:8x"] == longest_request(runtime, 1, Budget(ratio=8)) - 2
    assert around_get_worker_info(lambda self: stock_info, worker)[LENGTH] == limits["one-shot:64x"] + 2
    # A server that packs nothing offers no one-shot levels.
    runtime = ToyServer(high="bf16", window=0).runtime
    assert longest_prompts(runtime) == {"default": longest_request(runtime, 0) - 2}
    # A request's limit does not count on the demotion of cold blocks.
    runtime = ToyServer(high="k8v4", floor="k4v4").runtime
    monkeypatch.setattr("sglang_kvc.cache.runtime._current", runtime)
    worker.model_config.context_len = 100_000
    assert longest_request(runtime, 2) > longest_request(runtime, 1)
    assert around_get_worker_info(lambda self: stock_info, worker)[LENGTH] == longest_request(runtime, 1)


@pytest.mark.parametrize("stock", [False, True])
def test_prompts_of_any_length_reach_the_refusal_that_names_their_limit(monkeypatch, stock):
    """SGLang's own refusal names, and its truncation leaves, one token more than SGLang accepts."""
    runtime = ToyServer(high="k4v4").runtime
    runtime.prompt_limit = 99
    monkeypatch.setattr("sglang_kvc.cache.runtime._current", None if stock else runtime)

    def validated(tokens: int, truncate: bool = False) -> tuple[str | None, int]:
        req = arriving(tokens)
        why = around_validate_input_length(validate_input_length, req, 100, truncate)
        return why, len(req.origin_input_ids)

    assert validated(99) == (None, 99) and (validated(100)[0] is None) is not stock
    assert validated(99, True) == (None, 99) and validated(500, True) == (None, 100 if stock else 99)


@pytest.mark.parametrize("options", [{}, {"one_shot": Budget(ratio=50)}, {"one_shot": Budget(tokens=1000 * P)}])
def test_truncated_prompt_is_served_at_its_level(monkeypatch, options):
    """With `--allow-auto-truncate`. Each prompt here is shorter than the longest that SGLang accepts at any level."""
    runtime = ToyServer(high="k4v4", window=0, **options).runtime
    monkeypatch.setattr("sglang_kvc.cache.runtime._current", runtime)
    limits = longest_prompts(runtime)
    most = max(limits.values()) + 1
    lossless = longest_request(runtime, 0) - 2
    for level, longest in ((None, limits["default"]), (LOSSLESS, lossless), ("one-shot:8x", limits["one-shot:8x"])):
        for tokens in (lossless, longest, longest + 1, most - 1):
            req = arriving(tokens, 9, level)
            assert around_validate_input_length(validate_input_length, req, most, True) is None
            assert len(req.origin_input_ids) == min(tokens, longest)
            before_add_request_to_queue(SimpleNamespace(), req)
            assert not req.messages
            assert tokens < longest or req.sampling_params.max_new_tokens == 1
    req = arriving(most, 1, "k2v2")  # the queue refuses it
    assert around_validate_input_length(validate_input_length, req, most, True) is None
    assert len(req.origin_input_ids) == most


def test_refusal_names_longest_prompt_of_context(monkeypatch):
    runtime = ToyServer(high="k4v4", window=0).runtime
    monkeypatch.setattr("sglang_kvc.cache.runtime.current", lambda: runtime)
    runtime.prompt_limit = 50
    assert set(longest_prompts(runtime).values()) == {50}
    for level in (None, LOSSLESS, "one-shot:8x"):
        assert enter(50, 1, level)[0] == []
        (message,) = enter(51, 1, level)[0]
        assert "model's context; use a prompt of up to 50 tokens." in message


def test_request_limit_depends_on_its_level(monkeypatch):
    """An uncompressed request that does not fit is refused where a packed one is served, and answers are cut to fit."""
    server = ToyServer(high="k4v4")
    runtime = server.runtime
    monkeypatch.setattr("sglang_kvc.cache.runtime.current", lambda: runtime)

    packed, plain = longest_request(runtime, 1), longest_request(runtime, 0)
    assert plain < runtime.sizing.capacity_tokens < packed
    assert enter(plain, 100) == ([], 100, 100)
    messages, *_ = enter(plain, 100, LOSSLESS)
    assert f"prompt of {plain} tokens does not fit into the KV cache at lossless" in messages[0]
    assert enter(plain - 50, 100, LOSSLESS) == ([], 49, 49)
    assert enter(packed - 50, 100) == ([], 49, 49)
    assert enter(packed, 1)[0]
