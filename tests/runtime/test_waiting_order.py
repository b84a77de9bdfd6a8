"""Order of admission when more prompts wait than a scheduling pass matches with the radix tree."""

from __future__ import annotations

import random
from array import array
from unittest import mock

import pytest
from sglang.srt.managers import schedule_policy
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.sampling.sampling_params import SamplingParams

from bench import scheduler
from sglang_kvc.adapter.waiting_order import MOST_MATCHES

from .model import P, ToyServer

WAITING = 3 * schedule_policy.WAITING_QUEUE_PREFIX_MATCH_MAX
PASSES = -(-WAITING // (MOST_MATCHES // 4))  # after as many, each prompt has been matched


class Line:
    """A toy server and prompts that wait for it. Prompt i has 1 to 4 blocks; those of one in eight are cached."""

    def __init__(self, policy: str, hooks: bool = True):
        self.server = ToyServer(high="bf16", blocks=3 * WAITING // 8 + 16)
        self.policy, self.hooks = SchedulePolicy(policy, self.server.tree, False, False, False), hooks
        draw = random.Random(5)
        self.queue = [self.request(i, draw.choice([1, 2, 4]), draw.randint(0, 900)) for i in range(WAITING)]
        draw.shuffle(self.queue)
        self.cached = [req for req in self.queue if int(req.rid) % 8 == 0]
        for req in self.cached:
            blocks = draw.randint(1, len(req.origin_input_ids) // P)
            self.server.finish(self.server.admit([*req.origin_input_ids[: blocks * P], 1]))

    @staticmethod
    def request(i: int, blocks: int, arrived: int) -> Req:
        params = SamplingParams(max_new_tokens=4)
        params.normalize(None)
        prompt = array("q", [*range(1000 * i, 1000 * i + blocks * P), 7])
        req = Req(f"{i:04}", "", prompt, params, vocab_size=1 << 20)
        req.arrival_processed_tokens = arrived
        return req

    def add_twins(self) -> list[Req]:
        """Two prompts with the same uncached prefix, near the front."""
        twins = [self.request(5000, 4, -(10**6)) for _ in range(2)]
        for i, req in enumerate(twins):
            req.rid = f"twin {i}"
        self.queue[:0] = twins
        return twins

    def order(self, passes: int = 1) -> list[str]:
        """The waiting prompts in the order of the last of some passes."""
        with scheduler.configured(self.server.runtime if self.hooks else None, rows=8):
            for _ in range(passes):
                self.policy.calc_priority(self.queue, None, processed_tokens=1000)
        return [req.rid for req in self.queue]


def test_order_of_many_prompts_is_that_of_unbounded_matching(monkeypatch):
    bounded, stock, unbounded = Line("hrrn"), Line("hrrn", hooks=False), Line("hrrn", hooks=False)
    arrival, order = [req.rid for req in stock.queue], bounded.order(PASSES)
    assert stock.order() == arrival  # first come, first served
    monkeypatch.setattr(schedule_policy, "WAITING_QUEUE_PREFIX_MATCH_MAX", WAITING)
    assert order == unbounded.order()


@pytest.mark.parametrize("waiting", [MOST_MATCHES, MOST_MATCHES + 1, WAITING])
def test_pass_matches_bounded_number_of_prompts(waiting):
    line = Line("hrrn")
    del line.queue[waiting:]
    with mock.patch.object(schedule_policy, "match_kv_cache", wraps=schedule_policy.match_kv_cache) as match:
        line.order()
        assert match.call_count == MOST_MATCHES
        line.order(PASSES - 1)
    assert {call.args[0].rid for call in match.call_args_list} == {req.rid for req in line.queue}


def test_first_in_line_are_matched_in_every_pass():
    """Their blocks may have been evicted since the last one."""
    line = Line("hrrn")
    line.order(PASSES)
    first = [req for req in line.queue[: MOST_MATCHES // 2] if req.num_matched_prefix_tokens]
    line.server.tree.evict(EvictParams(num_tokens=1 << 20))
    line.order()
    assert first and not any(req.num_matched_prefix_tokens for req in first)


def test_new_prompt_is_matched_in_next_pass():
    line = Line("hrrn")
    line.order(PASSES)
    late = Line.request(int(line.cached[0].rid), 4, 1000)
    late.rid = "late"
    line.queue.append(late)
    line.order()
    assert late.num_matched_prefix_tokens > 0


def test_prompt_waits_for_other_with_same_uncached_prefix():
    line = Line("hrrn")
    twins = line.add_twins()
    line.order(2 * PASSES)
    last = line.queue[-1]
    assert last in twins and line.queue[-2] not in twins


def test_prompt_is_no_longer_deferred_when_other_is_gone():
    line = Line("hrrn")
    twins = line.add_twins()
    line.order(2 * PASSES)
    last = line.queue[-1]
    assert last in twins and last.kvc_deferred
    line.queue[:] = [last, *(req for req in line.queue[: MOST_MATCHES - 1] if req not in twins)]
    line.order()  # few prompts wait, and all are matched
    assert not last.kvc_deferred


def test_deferred_prompt_is_matched_again_however_many_arrive():
    """It is sorted behind all others until then, so it would wait for ever."""
    line = Line("hrrn")
    twins = line.add_twins()
    line.order(2 * PASSES)
    deferred = line.queue[-1]
    assert deferred.kvc_deferred
    line.queue.remove(next(req for req in twins if req is not deferred))  # admitted
    for i in range(2 * PASSES):
        line.queue += [Line.request(6000 + MOST_MATCHES * i + j, 1, 1000) for j in range(MOST_MATCHES)]
        line.order()
        if not deferred.kvc_deferred:
            break
        del line.queue[:MOST_MATCHES]  # as many are admitted as arrive
    assert not deferred.kvc_deferred and line.queue[0] is deferred


def test_longest_prefix_falls_back_to_order_of_arrival():
    line = Line("lpm")
    arrival = [req.rid for req in line.queue]
    assert line.order() == arrival


def test_other_orders_match_every_prompt():
    line = Line("dfs-weight")
    with mock.patch.object(schedule_policy, "match_kv_cache", wraps=schedule_policy.match_kv_cache) as match:
        line.order()
    assert match.call_count == WAITING
