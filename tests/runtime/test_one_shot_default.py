"""Requests to a server with `--kvc-one-shot`, as they enter SGLang's queue."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt import runtime_context

from kvc_patches.limits import longest_prompts
from kvc_patches.requests import before_add_request_to_queue
from sglang_kvc.adapter.request_limits import longest_request
from sglang_kvc.cache.one_shot import Budget
from sglang_kvc.options.request_quality import is_private

from .model import P, ToyServer

CHUNK = 2 * P
DEFAULT = Budget(ratio=16)


@pytest.fixture(autouse=True)
def configured():
    with runtime_context.get_context().override_server_args(device="cpu", chunked_prefill_size=CHUNK):
        yield


@pytest.fixture
def queue(monkeypatch):
    """`queue(**options)` -> enter(tokens, custom_params), a request of such a server that has entered the queue. Its
    `messages` say why it was aborted."""

    def start(**options):
        runtime = ToyServer(**{"high": "k4v4", "window": 0, "one_shot": DEFAULT, **options}).runtime
        monkeypatch.setattr("sglang_kvc.cache.runtime.current", lambda: runtime)

        def enter(tokens: int, params=None, **changes):
            sampling = SimpleNamespace(custom_params=params, max_new_tokens=9, min_new_tokens=0)
            facts = dict(
                origin_input_ids=[0] * tokens, sampling_params=sampling, extra_key=None, to_finish=None, lora_id=None,
                session=None, session_id=None, return_routed_experts=False, return_logprob=False, logprob_start_len=-1,
                return_hidden_states=False, input_embeds=None, positional_embed_overrides=None,
                multimodal_inputs=None, messages=[],
            )  # fmt: skip
            req = SimpleNamespace(**{**facts, **changes})
            req.set_finish_with_abort = req.messages.append
            before_add_request_to_queue(SimpleNamespace(), req)
            return req

        enter.runtime = runtime
        return enter

    return start


def is_one_shot(req, budget=DEFAULT) -> bool:
    """Whether a request has the budget, under a key of its own, or else is stored in the server's format and shared."""
    if req.kvc_budget is None:
        assert (req.kvc_level, req.extra_key, req.kvc_private) == (None, None, False)
        return False
    assert (req.kvc_level, req.kvc_budget) == (str(budget), budget) and req.kvc_private and is_private(req.extra_key)
    return True


@pytest.mark.parametrize("params", [None, {}, {"kvc": None}, {"kvc_done": True}, {"other": 5}])
def test_requests_without_level_get_default(queue, params):
    enter = queue()
    first, second = enter(10 * P, params), enter(10 * P, params)
    assert is_one_shot(first) and is_one_shot(second) and first.extra_key != second.extra_key
    assert not first.messages and first.sampling_params.max_new_tokens == 9
    explicit = enter(10 * P, {"kvc": "one-shot:16x"})
    assert is_one_shot(explicit) and explicit.extra_key.split("#")[0] == first.extra_key.split("#")[0]
    assert not is_one_shot(queue(one_shot=None)(10 * P, params))


def test_requests_override_default(queue):
    enter = queue(levels=("k8v8",))
    assert not is_one_shot(enter(10 * P, {"kvc": "k4v4"}))
    for name in ("lossless", "k8v8"):
        req = enter(10 * P, {"kvc": name})
        assert (req.kvc_level, req.kvc_budget, req.kvc_private, req.messages) == (name, None, False, [])
    assert is_one_shot(enter(10 * P, {"kvc": "one-shot:8x"}), Budget(ratio=8))
    assert is_one_shot(enter(10 * P, {"kvc": "one-shot:99"}), Budget(tokens=99))
    with_floor = queue(high="k8v4", floor="k4v4")
    assert is_one_shot(with_floor(10 * P))
    assert (kept := with_floor(10 * P, {"kvc": "k8v4"})).kvc_level == "k8v4" and kept.kvc_budget is None
    wrong = enter(10 * P, {"kvc": "k2v2"})
    assert "not a level" in wrong.messages[0] and wrong.kvc_budget is None


def test_requests_that_cannot_be_one_shot_fall_back(queue):
    enter = queue()
    assert is_one_shot(enter(10 * P))
    for changes in ({"session": object()}, {"session_id": "chat"}, {"return_routed_experts": True}):
        req = enter(10 * P, **changes)
        assert not is_one_shot(req) and not req.messages
    enter.runtime.generates = False
    assert not is_one_shot(enter(10 * P))
    enter.runtime.generates = True
    # The same request gets an error if it names the budget.
    assert "session" in enter(10 * P, {"kvc": "one-shot:16x"}, session=object()).messages[0]


@pytest.mark.parametrize("budget", [DEFAULT, Budget(ratio=4.5), Budget(tokens=2 * P)])
def test_prompt_that_loses_no_token_is_shared(queue, budget):
    """A prompt is one-shot exactly if its kept pages are fewer than those of its full blocks in the server's format."""
    enter = queue(one_shot=budget)
    layout, block = enter.runtime.layout, enter.runtime.store.block_formats[1]
    sizes = [1, 9, P - 1, P, P + 1, 2 * P, 2 * P + 1, 3 * P, 5 * P + 3, 9 * P]
    got = [is_one_shot(enter(n), budget) for n in sizes]
    for tokens, shot in zip(sizes, got):
        plan = budget.plan(layout, block.high, tokens // P, tokens)
        assert shot == (plan is not None and plan.pages < tokens // P * block.pages)
    assert got == sorted(got) and not got[0] and got[-1]  # longer prompts are one-shot, shorter ones are not


def test_longest_prompts_count_default_budget(queue):
    """A request that names no level may be as long as the better of budget and format allows."""
    enter = queue(one_shot=Budget(ratio=50))
    runtime = enter.runtime
    limits = longest_prompts(runtime)
    assert limits["one-shot:50x"] == longest_request(runtime, 1, Budget(ratio=50)) - 2
    assert limits["k4v4"] == longest_request(runtime, 1) - 2 < limits["default"] == limits["one-shot:50x"]
    for tokens in (limits["k4v4"], limits["k4v4"] + 1, limits["default"]):
        assert is_one_shot(enter(tokens), Budget(ratio=50)) and not enter(tokens).messages
    (message,) = enter(limits["default"] + 1).messages
    assert f"at one-shot:50x, which holds {runtime.sizing.capacity_tokens} tokens" in message
    assert f"up to {limits['default']} tokens" in message and message.count(". ") == 0
    assert enter(limits["k4v4"] + 1, {"kvc": "k4v4"}).messages


def test_budget_does_not_lengthen_prompts_of_embedding_models(queue):
    runtime = queue(one_shot=Budget(ratio=50)).runtime
    runtime.generates = False
    assert longest_prompts(runtime) == {"default": longest_request(runtime, 1) - 2}


def test_log_probabilities_of_thinned_prompt_come_from_format(queue):
    """They need every token. If the prompt does not fit in the server's format, the request is refused."""
    enter = queue()
    limits = longest_prompts(enter.runtime)
    room = enter.runtime.capacity.one_shot
    thinned = next(n for n in range(limits["k4v4"], P, -1) if 0 < room.segment_blocks(DEFAULT, n, 1, CHUNK) < 8)
    scored = {"return_logprob": True, "logprob_start_len": 0}
    assert is_one_shot(enter(thinned)) and is_one_shot(enter(5 * P, **scored))
    req = enter(thinned, **scored)
    assert not is_one_shot(req) and not req.messages
    assert "log-probabilities" in enter(thinned, {"kvc": "one-shot:16x"}, **scored).messages[0]
    assert "log-probabilities" in enter(limits["k4v4"] + P, **scored).messages[0]


def test_prompt_that_only_budget_holds_is_served(queue):
    """With a large chunk, a prompt packed in segments of 8 blocks may be longer than one packed chunk by chunk. The
    budget then serves it even if it drops no token."""
    with runtime_context.get_context().override_server_args(device="cpu", chunked_prefill_size=12 * P):
        enter = queue(blocks=40, one_shot=Budget(tokens=1000 * P))
        limits = longest_prompts(enter.runtime)
        assert limits["default"] == limits["one-shot:64000"] > limits["k4v4"]
        assert not is_one_shot(enter(limits["k4v4"]), Budget(tokens=1000 * P))
        req = enter(limits["k4v4"] + 1)
        assert is_one_shot(req, Budget(tokens=1000 * P)) and not req.messages


def test_refusal_names_longest_prompt_of_better_limit(queue):
    """With small chunks, the open segment of 8 blocks gives the budget a lower limit than the server's format."""
    budget = Budget(tokens=1000 * P)
    enter = queue(blocks=40, one_shot=budget)
    limits = longest_prompts(enter.runtime)
    assert limits["default"] == limits["k4v4"] > limits[str(budget)]
    served, req = enter(limits["default"]), enter(limits["default"] + 1)
    assert not is_one_shot(served, budget) and not served.messages
    assert not is_one_shot(req, budget) and f"up to {limits['default']} tokens" in req.messages[0]


@pytest.mark.parametrize("inputs", [{"multimodal_inputs": object()}, {"positional_embed_overrides": object()}])
def test_prompts_with_images_or_embeddings_are_never_thinned(queue, inputs):
    """Their places must match the tokens, also after a retraction, which adds the answer to the prompt."""
    enter = queue()
    room = enter.runtime.capacity.one_shot
    served = range(longest_request(enter.runtime, 1) - 9, P, -1)
    whole = [room.segment_blocks(DEFAULT, n, 1, CHUNK) in (0, 8) for n in served]
    longest, thinned = served[whole.index(True)], served[whole.index(False)]
    assert room.segment_blocks(DEFAULT, longest, 1, CHUNK) == 8
    assert is_one_shot(enter(thinned))
    by_default = enter(thinned, **inputs)
    assert by_default.kvc_budget is None and not by_default.messages
    (message,) = enter(thinned, {"kvc": "one-shot:16x"}, **inputs).messages
    assert "neither images nor embeddings as input" in message and f"up to {longest} tokens" in message
    assert message.count(". ") == 0
    for params in (None, {"kvc": "one-shot:16x"}):
        cut, whole = enter(longest - 5, params, **inputs), enter(longest - 5, params)
        assert not cut.messages and cut.kvc_budget and cut.sampling_params.max_new_tokens == 4
        assert whole.sampling_params.max_new_tokens == 9
