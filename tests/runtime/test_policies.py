"""Every policy serves requests: prompts are packed as planned, answers continue, prefixes are hit, and nothing
leaks."""

from __future__ import annotations

import pytest

from sglang_kvc.options.resolve import policy_options
from sglang_kvc.policies import POLICIES
from tests.policies.support import statistics

from .model import P, ToyServer

PROMPT = [*range(5 * P), 7]


@pytest.fixture(scope="module")
def calibration(tmp_path_factory) -> str:
    return statistics(tmp_path_factory.mktemp("statistics"))


@pytest.mark.parametrize("policy", POLICIES)
def test_policy_serves_prompt_answer_and_prefix_hit(policy, calibration):
    options = policy_options(policy)
    if getattr(POLICIES[policy](), "needs", ()):
        options["calibration"] = calibration
    if options["high"] == "k8v8":  # with scores, the toy server's pages hold too few tokens of this format
        options["high"] = "k8v4"
    server = ToyServer(policy=policy, blocks=16, **options)
    first = server.admit(PROMPT, chunk=2 * P)
    for i in range(P + 2):
        assert server.decode(first, 1000 + i)
    packed = server.runtime.counters.compactions
    assert packed >= 3
    server.check()
    server.finish(first)
    second = server.admit(PROMPT)
    assert second.kv.cache_protected_len == 5 * P
    server.check()
    server.finish(second)
    server.check()
