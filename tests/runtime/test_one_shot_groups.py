"""One-shot prompts are ranked for groups of layers: sizes of the groups, and the same bytes whatever the size."""

from __future__ import annotations

import pytest
import torch

from kvc_kernels import ops
from kvc_kernels.scores import prompt_end
from sglang_kvc.cache import page_ops, thinning

from .model import D, H, L, P, make_runtime
from .test_one_shot import prompt, runtime  # noqa: F401  (a fixture)
from .test_thinning import arrive

TOKENS = 10 * P + 9


@pytest.mark.parametrize("ranked, heads", [(1, 1), (1 << 22, H + 1)])
def test_groups_of_layers_and_heads_do_not_change_bytes(monkeypatch, ranked, heads):
    """A prompt that fits and one that is thinned, ranked a layer at a time or all at once; steps of the scoring that
    end within a layer."""
    monkeypatch.setattr(thinning, "SEGMENT", 4)

    def digests() -> list[list[str]]:
        out = []
        for blocks, room in ((10, 16), (20, 7)):
            server = make_runtime(window=0, high="k4v4", blocks=room)
            server.page_ops.gaps = ops.RowGaps(8, torch.device("cpu"))
            if room == 16:
                seq, *_ = prompt(server, blocks * P + 9, "one-shot:20x")
            else:
                seq, *_ = arrive(server, blocks * P + 9, P, "one-shot:8x")
            server.flush()
            assert seq.gap
            out.append([ops.block_digest(server.store, b) for b in seq.blocks[: seq.one_shot.first]])
        return out

    sizes = []

    def counted(store, layers, *args, **kw):
        sizes.append(layers.stop - layers.start)
        return prompt_scores(store, layers, *args, **kw)

    want, prompt_scores = digests(), ops.prompt_scores
    monkeypatch.setattr(ops, "prompt_scores", counted)
    monkeypatch.setattr(page_ops, "RANKED_SCORES", ranked)
    monkeypatch.setitem(prompt_end.STEP_ELEMENTS, "cpu", heads * (20 * P + 9) * D)
    assert digests() == want
    assert set(sizes) == {1 if ranked == 1 else L}


@pytest.mark.parametrize("limit, layers", [(2 * H * TOKENS, 2), (2 * H * TOKENS - 1, 1), (1, 1)])
def test_group_has_as_many_layers_as_limit_allows(runtime, monkeypatch, limit, layers):  # noqa: F811
    ranked, rows = ops.ranked_tokens, []

    def counted(scores, *args):
        rows.append(len(scores))
        return ranked(scores, *args)

    monkeypatch.setattr(page_ops, "RANKED_SCORES", limit)
    monkeypatch.setattr(ops, "ranked_tokens", counted)
    prompt(runtime, TOKENS, "one-shot:20x")
    runtime.flush()
    assert rows == [layers * H] * (L // layers)
