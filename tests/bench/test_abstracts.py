"""The benchmark of the eviction abstracts: a policy serves only if every check holds."""

import pytest

from bench.serve.abstracts import CALIBRATED, METHODS, serves
from sglang_kvc.policies import POLICIES

GOOD = {
    "full_answers": True, "follow_up_cached_tokens": 64, "packed_tokens": 128,
    "tokens_by_tier": {"high": 10, "pruned": 10}, "errors": [],
}  # fmt: skip


@pytest.mark.parametrize(
    "wrong",
    [{"full_answers": False}, {"follow_up_cached_tokens": 0}, {"packed_tokens": 0}, {"packed_tokens": None},
     {"tokens_by_tier": {"high": 20, "pruned": 0}}, {"tokens_by_tier": None}, {"errors": ["Traceback"]}],
)  # fmt: skip
def test_every_check_counts(wrong):
    assert serves(GOOD) and not serves(GOOD | wrong)


def test_failed_start_does_not_serve():
    assert not serves({"method": "CAKE", "errors": ["ServerError: the server ended"]})


def test_policies_exist_and_get_the_calibration_they_need():
    for name in METHODS:
        policy = POLICIES[name]()
        assert bool(policy.needs) == (name in CALIBRATED)
