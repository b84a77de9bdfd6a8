"""Names of levels in requests, on which the tokenizer process and the scheduler agree."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvc_kernels.layout import PoolLayout
from kvc_patches import requests
from sglang_kvc.cache.one_shot import Budget
from sglang_kvc.options import resolve
from sglang_kvc.options.request_hints import Hints
from sglang_kvc.options.request_quality import namespace
from sglang_kvc.options.resolve import resolve_config
from sglang_kvc.policies import make_policy

from .conftest import one_sentence

pytestmark = pytest.mark.usefixtures("server_args")


@pytest.fixture
def serve(parse, monkeypatch):
    """`serve(*options)` -> ask(level), which runs the checks of both processes of such a server and returns the level
    that the scheduler records."""

    def start(*options, params=lambda level: {"kvc": level}):
        args = parse("--kv-backend", "kvc", *options)
        config = resolve.resolve_config(args)
        monkeypatch.setattr("sglang.srt.runtime_context.get_server_args", lambda: args)
        policy, layout = make_policy(config), PoolLayout(1, 1, 128, 128, 8448)
        store = SimpleNamespace(block_formats=policy.block_formats(layout))
        runtime = SimpleNamespace(
            config=config, policy=policy, salt_only=False, windowed=False, layout=layout, store=store
        )
        monkeypatch.setattr("sglang_kvc.cache.runtime.current", lambda: runtime)

        def ask(level):
            sampling = SimpleNamespace(custom_params=params(level))
            aborts = []
            req = SimpleNamespace(
                sampling_params=sampling, extra_key=None, set_finish_with_abort=aborts.append, session=None,
                session_id=None, return_routed_experts=False, positional_embed_overrides=None, lora_id=None,
                to_finish=True,  # an aborted request skips the length check
            )  # fmt: skip
            refused = None
            try:
                requests.before_verify(sampling, 1000)
            except ValueError as e:
                refused = e
            # This also holds if no other process has checked the request.
            requests.before_add_request_to_queue(SimpleNamespace(), req)
            assert aborts == ([str(refused)] if refused else [])
            if refused:
                raise refused
            ask.req = req
            return req.kvc_level

        return ask

    return start


@pytest.mark.parametrize(
    "options, default_format",
    [
        ("", "k4v4"),
        ("--kvc-high k8v4", "k8v4"),
        ("--kvc-policy safe", "k8v4"),
        ("--kvc-high bf16 --kvc-levels k4v4", "bf16"),
        ("--kvc-high K4V4 --kvc-levels k8v4", "k4v4"),
    ],
)
def test_name_of_default_format_equals_no_level(serve, options, default_format):
    ask = serve(*options.split())
    assert ask(default_format) is None and ask(None) is None
    assert ask("lossless") == "lossless"
    with pytest.raises(ValueError, match="'k2v2', which is not"):
        ask("k2v2")


@pytest.mark.parametrize(
    "options",
    [
        "--kvc-policy quota --kvc-high k4v4",
        "--kvc-policy quota",
        "--kvc-policy prune --kvc-keep 1",
        "--kvc-policy mikv",
        "--kvc-policy leankv --kvc-high k4v4 --kvc-low k4v2",
    ],
)
def test_pruning_server_rejects_format_names(serve, options):
    ask = serve(*options.split())
    with pytest.raises(ValueError) as e:
        ask("k4v4")
    assert "not a level" in one_sentence(str(e.value))
    assert ask("lossless") == "lossless" and ask(None) is None


@pytest.mark.parametrize("wrong", ["lossless", ["kvc", "lossless"], 5, []])
def test_parameters_must_be_object(serve, wrong):
    with pytest.raises(ValueError, match="custom_params") as e:
        serve(params=lambda _: wrong)("lossless")
    one_sentence(str(e.value))


TEXT = "x" * 10**6
LONG = {"name": {"kvc": TEXT}, "object": {"kvc": {"a": "\n" * 10**6}}, "text": TEXT, "list": [TEXT] * 10**4}


@pytest.mark.parametrize("params", LONG.values(), ids=LONG)
def test_long_values_are_shortened_in_errors(serve, params):
    """The sentence appears in the log and in the answer."""
    with pytest.raises(ValueError, match="custom_params") as e:
        serve(params=lambda _: params)("lossless")
    assert len(one_sentence(str(e.value))) < 400


def test_offered_formats_are_accepted(serve):
    ask = serve("--kvc-levels", "k8v4,k2v2")
    assert [ask(x) for x in ("k8v4", "k2v2", "k4v4", None)] == ["k8v4", "k2v2", None, None]


def test_named_default_format_is_kept_when_server_has_floor(serve):
    ask = serve("--kvc-high", "k8v4", "--kvc-floor", "k4v4")
    assert [ask(x) for x in ("k8v4", "lossless", None)] == ["k8v4", "lossless", None]
    with pytest.raises(ValueError, match="'k4v4', which is not a level"):
        ask("k4v4")


@pytest.mark.parametrize("options", ["", "--kvc-levels k8v4", "--kvc-policy leankv", "--kvc-high bf16"])
def test_server_can_reject_uncompressed_requests(serve, options):
    ask = serve("--kvc-allow-lossless", "false", *options.split())
    with pytest.raises(ValueError, match=r"'lossless', which this server does not allow") as e:
        ask("lossless")
    assert '"lossless"' not in one_sentence(str(e.value))  # among what to give instead
    assert ask(None) is None
    if "k8v4" in options:
        assert ask("k8v4") == "k8v4"
    assert serve("--kvc-allow-lossless", "true", *options.split())("lossless") == "lossless"


@pytest.mark.parametrize(
    "options", ["", "--kvc-high k8v4 --kvc-levels k4v4", "--kvc-policy safe", "--kvc-policy balanced"]
)
def test_one_shot_budget_is_accepted(serve, options):
    ask = serve(*options.split())
    assert ask("One-Shot:16X") == "one-shot:16x" and ask.req.kvc_budget == Budget(ratio=16) and ask.req.kvc_private
    first = ask.req.extra_key
    assert ask("one-shot:16x") == "one-shot:16x" and ask.req.extra_key != first  # no other request hits its blocks
    assert ask("one-shot:512") == "one-shot:512" and ask.req.kvc_budget == Budget(tokens=512)
    assert ask(None) is None and ask.req.kvc_budget is None and not ask.req.kvc_private
    assert ask("lossless") == "lossless" and ask.req.kvc_budget is None
    with pytest.raises(ValueError, match="from 1 to 64") as e:
        ask("one-shot:100x")
    one_sentence(str(e.value))
    with pytest.raises(ValueError, match='"one-shot:16x"'):  # among what to give instead
        ask("k2v2")


@pytest.mark.parametrize(
    "options",
    [
        "--kvc-allow-one-shot false", "--kvc-window 64", "--kvc-high bf16", "--kvc-high bf16 --kvc-levels k4v4",
        "--kvc-policy leankv", "--kvc-policy quota", "--kvc-policy safe --kvc-allow-one-shot False",
    ],
)  # fmt: skip
def test_servers_without_budgets_reject_them(serve, options):
    ask = serve(*options.split())
    with pytest.raises(ValueError, match=r"does not offer, because .*quantize.*--kvc-window 0.*--kvc-allow") as e:
        ask("one-shot:8x")
    one_sentence(str(e.value))
    assert ask(None) is None


def test_session_cannot_have_budget(serve):
    ask = serve()
    assert ask("one-shot:8x") == "one-shot:8x"
    aborts, req = [], ask.req
    again = SimpleNamespace(
        sampling_params=req.sampling_params, extra_key=None, set_finish_with_abort=aborts.append, session=object(),
        return_routed_experts=False, positional_embed_overrides=None, lora_id=None, to_finish=True,
    )  # fmt: skip
    requests.before_add_request_to_queue(SimpleNamespace(), again)
    assert len(aborts) == 1 and "session" in one_sentence(aborts[0])
    assert again.kvc_level is None and again.kvc_budget is None and not again.kvc_private


def test_hint_must_be_boolean(serve):
    """Both processes reject any other value."""
    ask = serve(params=lambda value: {"kvc_done": value})
    with pytest.raises(ValueError, match=r'"kvc_done"'):
        ask("yes")
    assert ask(True) is ask(None) is None


@pytest.mark.parametrize("name", ["kvc_ttl", "kvc_steps"])
@pytest.mark.parametrize("value", ["5", True, -1, float("nan"), float("inf"), 10**400, [1]])
def test_hint_must_be_number_in_range(serve, name, value):
    ask = serve(params=lambda value: {name: value})
    most = {"kvc_ttl": 86400, "kvc_steps": 10**6}[name]
    with pytest.raises(ValueError, match=f'"{name}".* from 0 to {most};') as e:
        ask(value)
    one_sentence(str(e.value))
    with pytest.raises(ValueError, match="from 0 to"):
        ask(most + 1)
    assert ask(0) is ask(most) is ask(None) is None


def test_steps_are_whole(serve):
    ask = serve(params=lambda value: {"kvc_ttl": value, "kvc_steps": 2})
    assert ask(0.5) is None and ask.req.kvc_hints == Hints(ttl=0.5, steps=2)
    with pytest.raises(ValueError, match="integer"):
        serve(params=lambda value: {"kvc_steps": value})(2.0)


def test_settings_are_resolved_once(serve, monkeypatch):
    requests._resolved.cache_clear()
    ask, seen = serve("--kvc-levels", "k8v4"), []
    monkeypatch.setattr(resolve, "resolve_config", lambda args: seen.append(1) or resolve_config(args))
    assert ask("k8v4") == ask("k8v4") == "k8v4"
    assert len(seen) == 1


def test_namespaces_of_levels_and_keys_never_collide():
    levels, keys = (None, "lossless", "k8v4"), (None, "A", "A|kvc=lossless", "kvc=lossless|A", "kvc=|A", "kvc=", "|A")
    namespaces = {(level, key or None): namespace(key, level) for level in levels for key in keys}
    assert len(set(namespaces.values())) == len(namespaces)
    assert namespace(None, None) is None and namespace("A", None) == "A"
