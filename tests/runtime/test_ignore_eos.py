"""Answers of fixed length (`ignore_eos`) without a radix cache, for which SGLang has a different admission."""

from __future__ import annotations

from array import array

import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from .model import P, make_runtime
from .overlap import Overlap, configured


@pytest.mark.parametrize("disable", [False, True], ids=["radix", "no radix"])
@pytest.mark.parametrize("prompt, answer", [(12 * P, 4), (P, 12 * P)], ids=["prompt", "answer"])
def test_request_that_fits_only_packed_is_served(prompt, answer, disable):
    runtime = make_runtime(blocks=8, high="k4v4", window=0)
    assert runtime.sizing.capacity_tokens < 12 * P
    with configured(runtime, 2 * P, retract_every=10**6):
        server = Overlap(runtime, 2 * P, disable)
        for n in range(2):  # the second request waits behind the first one
            params = SamplingParams(max_new_tokens=answer, ignore_eos=True)
            params.normalize(None)
            req = Req(str(n), "", array("q", [10 * n + i for i in range(prompt)]), params, vocab_size=1 << 20)
            server.queue(req, [5] * answer)
        for _ in range(40 * P):
            if not server.busy:
                break
            server.turn()
        assert not server.busy
        for req in server.requests.values():
            assert len(req.output_ids) == answer and req.finished_reason.to_json()["type"] == "length"
            assert req.sampling_params.ignore_eos
