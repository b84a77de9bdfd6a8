"""Sharing of blocks that were packed by another request's evidence, with `--kvc-trust` all and salt."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvc_patches.requests import before_add_request_to_queue
from sglang_kvc.errors import ConfigError
from sglang_kvc.options.config import KvcConfig
from sglang_kvc.options.request_quality import LOSSLESS, is_private
from sglang_kvc.options.start_warnings import trust_warning
from sglang_kvc.options.validate import check_settings

from .model import P, ToyServer

LEANKV = {"policy": "leankv", "high": "k8v4", "low": "k4v2"}
PROMPT = [*range(2 * P), 7]


@pytest.fixture
def serve(monkeypatch):
    """`serve(**options)` -> a server, and admit(salt, level, lora, ..), which admits a request through the queue's
    hook. `embeds`: overrides of embeddings."""

    def start(**options):
        server = ToyServer(**options)
        monkeypatch.setattr("sglang_kvc.cache.runtime.current", lambda: server.runtime)

        def admit(salt=None, level=None, lora=None, chunk=None, session=None, cache_salt=None, embeds=None):
            queued = SimpleNamespace(
                sampling_params=SimpleNamespace(custom_params={"kvc": level} if level else None), lora_id=lora,
                session=session, cache_salt=cache_salt, positional_embed_overrides=embeds,
                extra_key=(salt or "") + lora if lora else salt,
                to_finish=True,  # an aborted request skips the length check
            )  # fmt: skip
            before_add_request_to_queue(SimpleNamespace(), queued)
            return server.admit(PROMPT, chunk=chunk, level=queued.kvc_level, queued=queued)

        return server, admit

    return start


def share(a, b) -> bool:
    same = {x == y for x, y in zip(a.kvc.blocks[:2], b.kvc.blocks[:2])}
    assert len(same) == 1
    return same.pop()


def test_all_requests_share_by_default(serve):
    _, admit = serve(high="k4v4")
    assert share(admit(), admit()) and share(admit("A"), admit("A")) and not share(admit("A"), admit("B"))


def test_trust_all_shares_evidence(serve):
    _, admit = serve(**LEANKV, trust="all")
    assert share(admit(), admit()) and share(admit("A"), admit("A")) and not share(admit("A"), admit("B"))


@pytest.mark.parametrize("scorer", ["mean-attention", "snapkv"])
def test_trust_salt_shares_only_within_salt(serve, scorer):
    _, admit = serve(policy="prune", scorer=scorer)
    assert share(admit("A"), admit("A")) and not share(admit("A"), admit("B"))
    assert not share(admit(), admit(""))


def test_cache_salt_is_a_salt(serve):
    _, admit = serve(**LEANKV)
    first, same, other = (admit(cache_salt=salt) for salt in ("A", "A", "B"))
    assert not first.kvc_private and share(first, same) and not share(first, other) and not share(first, admit())


def test_size_of_expert_group_does_not_act_as_salt(serve):
    """SGLang appends it to the `extra_key` of every request."""
    _, admit = serve(**LEANKV)
    key = "elastic_ep_size=4"
    assert not share(admit(key), admit(key)) and share(admit(f"A|{key}"), admit(f"A|{key}"))


def test_adapter_id_does_not_act_as_salt(serve):
    _, admit = serve(**LEANKV)
    assert not share(admit(lora="f00"), admit(lora="f00"))
    assert share(admit("A", lora="f00"), admit("A", lora="f00"))


def test_salt_cannot_name_private_namespace(serve):
    _, admit = serve(**LEANKV)
    private = admit()
    key = private.extra_key
    for salt in (key, key.rstrip("|"), key.split("=")[1]):
        assert not share(private, admit(salt))


@pytest.mark.parametrize("options", [{"high": "k4v4"}, {"policy": "prune", "scorer": "keydiff"}])
def test_blocks_without_evidence_are_always_shared(serve, options):
    _, admit = serve(**options)
    assert share(admit(), admit())


@pytest.mark.parametrize("chunk", [None, P])
def test_overridden_embeddings_share_nothing(serve, chunk):
    """Requests of `/v1/score` may have the same token ids and other embeddings."""
    server, admit = serve(high="k4v4")
    plain = admit()
    blocks = plain.kvc.blocks[:2]
    server.finish(plain)
    first, second = admit(embeds=object(), chunk=chunk), admit(embeds=object(), chunk=chunk)
    assert not share(first, second) and not {*blocks} & {*first.kvc.blocks, *second.kvc.blocks}
    for req in (first, second):
        server.finish(req)
    server.check()
    assert server.runtime.blocks.used_count == 2
    assert share(admit(), admit())


def test_uncompressed_blocks_are_always_shared(serve):
    _, admit = serve(**LEANKV)
    assert share(admit(level=LOSSLESS), admit(level=LOSSLESS))


def test_turns_of_session_share_blocks_without_salt(serve):
    server, admit = serve(**LEANKV)
    chat, other = SimpleNamespace(streaming=False), SimpleNamespace(streaming=False)
    first = admit(session=chat)
    blocks = first.kvc.blocks[:2]
    server.finish(first)
    again = admit(session=chat)
    assert again.kvc.blocks[:2] == blocks
    assert not share(again, admit(session=other)) and not share(again, admit())
    assert again.extra_key == first.extra_key and is_private(again.extra_key)  # never written to disk


@pytest.mark.parametrize("chunk", [None, P])
def test_private_blocks_are_freed_when_request_ends(serve, chunk):
    """No other request can hit them, so they must not displace blocks that can be hit."""
    server, admit = serve(**LEANKV)
    kept = admit("A")
    server.finish(kept)
    used = server.runtime.blocks.used_count
    other = admit(chunk=chunk)
    assert server.runtime.blocks.used_count > used
    server.finish(other)
    server.check()
    assert server.runtime.blocks.used_count == used == 2


def test_private_blocks_are_freed_after_aborted_chunk(serve):
    """SGLang then frees a finished request without inserting it."""
    server, admit = serve(**LEANKV)
    req = admit(chunk=P)
    req.aborted = True
    server.finish(req, insert=False)
    server.check()
    assert server.runtime.blocks.used_count == 0


def test_retracted_private_request_hits_its_blocks(serve):
    server, admit = serve(**LEANKV)
    req = admit()
    blocks = req.kvc.blocks[:2]
    server.finish(req, insert=False)  # retract it as SGLang does
    server.check()
    again = server.admit(PROMPT, queued=req)
    assert again.kvc.blocks[:2] == blocks
    server.finish(again)
    server.check()
    assert server.runtime.blocks.used_count == 0


def test_start_warns_about_shared_evidence():
    for options, policy in ((LEANKV, "leankv"), ({"policy": "prune", "scorer": "h2o"}, "prune")):
        private, shared = trust_warning(KvcConfig(**options)), trust_warning(KvcConfig(**options, trust="all"))
        assert f"--kvc-policy {policy}" in private and "set --kvc-trust all" in private
        assert f"--kvc-policy {policy}" in shared and "omit --kvc-trust all" in shared
    for config in (KvcConfig(), KvcConfig(policy="prune"), KvcConfig(trust="all")):
        assert trust_warning(config) is None
    with pytest.raises(ConfigError, match="--kvc-trust 'none'"):
        check_settings(KvcConfig(trust="none"))
