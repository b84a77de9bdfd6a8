"""LeanKV's thresholds are the largest ones that keep the answers of the exact cache."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from sglang_kvc.calibration import verdicts
from sglang_kvc.calibration.measure import answer_items, answers, command, thresholds
from sglang_kvc.calibration.measure.answer_items import Question, SharedPrompt
from sglang_kvc.calibration.measure.answers import AnswerResult
from sglang_kvc.calibration.measure.attention import causal
from sglang_kvc.calibration.measure.capture import CalibrateError
from sglang_kvc.calibration.measure.passes import calibrate
from sglang_kvc.calibration.measure.progress import Progress

from .conftest import BLOCK, DIM, HEADS, KV_HEADS, LAYERS, make_ids

SHAPE = (LAYERS, KV_HEADS, DIM)


def choose(by_high: dict[float, int], by_low: dict[float, int], of: int) -> tuple[float, float]:
    """The chosen pair if alpha_high and alpha_low lose these answers; absent values lose none."""
    asked = []

    def sweep(pairs):
        asked.extend(pairs)
        lost = [by_low.get(low, 0) if low else by_high.get(high, 0) for high, low in pairs]
        return [AnswerResult(*pair, right=of - n, of=of) for pair, n in zip(pairs, lost, strict=True)]

    alpha_high, alpha_low, tried = answers.choose(sweep)
    assert asked == [(r.alpha_high, r.alpha_low) for r in tried]
    assert all(r.alpha_high == alpha_high for r in tried if r.alpha_low)
    return alpha_high, alpha_low


@pytest.mark.parametrize(
    "by_high, by_low, of, expected",
    [
        ({}, {}, 10, (5.0, 0.3)),
        ({4.0: 1, 5.0: 1}, {0.1: 1, 0.3: 2}, 99, (3.0, 0.04)),
        ({4.0: 1, 5.0: 1}, {0.1: 1, 0.3: 2}, 100, (5.0, 0.1)),
        ({5.0: 2}, {0.02: 1, 0.04: 2, 0.1: 3, 0.3: 4}, 250, (5.0, 0.04)),
        ({2.0: 1}, {0.04: 1}, 10, (1.0, 0.02)),  # larger values that lose nothing do not count
        ({}, {0.02: 1}, 10, (5.0, 0.0)),
        ({1.0: 1}, {0.1: 1}, 10, (0.0, 0.04)),  # no low tier
        ({1.0: 1}, {0.02: 1}, 10, (0.0, 0.0)),
    ],
)
def test_largest_thresholds_within_limit_are_chosen(by_high, by_low, of, expected):
    assert choose(by_high, by_low, of) == expected


@torch.inference_mode()
def continuation(model, ids: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """The model's own greedy answer, without a cache."""
    out = list(ids)
    for _ in range(tokens):
        out.append(int(model(torch.tensor([out]), use_cache=False).logits[0, -1].argmax()))
    return tuple(out[len(ids) :])


@pytest.fixture(scope="module")
def shared(model):
    """A context of two whole blocks and a half with three questions, whose second answer is wrong in its last token."""
    context = tuple(make_ids(5 * BLOCK // 2, seed=3).tolist())
    out = SharedPrompt(context, 2 * BLOCK)
    for i, seed in enumerate((4, 5, 6)):
        ask = tuple(make_ids(7, seed=seed).tolist())
        answer = continuation(model, context + ask, 3)
        if i == 1:
            answer = (*answer[:-1], (answer[-1] + 1) % 90)
        out.questions.append(Question((context + ask + answer)[2 * BLOCK :], 3))
    return out


def test_exact_cache_gives_model_answers(model, shared):
    _, layout = answers.geometry(SHAPE, BLOCK)
    prompt = answers.exact_prompt(model, shared, layout, lambda layer: None)
    assert prompt.tokens == 2 * BLOCK
    assert [answers.right(model, prompt, q) for q in shared.questions] == [True, False, True]
    first = Question((*shared.questions[0].rest[:-3], 96, *shared.questions[0].rest[-2:]), 3)
    assert not answers.right(model, prompt, first)


def test_all_queries_of_shared_text_count(model, shared):
    """The half block after the planned ones asks, too, so scores differ from those of the planned tokens alone."""
    _, layout = answers.geometry(SHAPE, BLOCK)
    prompt = answers.exact_prompt(model, shared, layout, lambda layer: None)
    alone = SharedPrompt(shared.ids[: 2 * BLOCK], 2 * BLOCK)
    cut = answers.exact_prompt(model, alone, layout, lambda layer: None)
    torch.testing.assert_close(prompt.k[1], cut.k[1], rtol=1e-4, atol=1e-4)
    assert prompt.scores[0].shape == cut.scores[0].shape
    assert float(cut.scores[0][:, -1].max()) == 0 and float(prompt.scores[0][:, -1].min()) > 0


def test_items_of_one_context_share_passes(model, shared, monkeypatch):
    passes = []
    original = answers.exact_prompt

    def counted(model, prompt, layout, step):
        passes.append(prompt.planned)
        return original(model, prompt, layout, step)

    monkeypatch.setattr(answers, "exact_prompt", counted)
    monkeypatch.setattr(answers, "stored", lambda prompt, *_: prompt)
    chosen, tried = answers.measure(model, [shared], SHAPE, BLOCK, Progress())
    assert passes == [2 * BLOCK] * answers.SWEEPS
    assert (chosen.alpha_high, chosen.alpha_low) == (5.0, 0.3)  # the stored prompt is exact here
    assert [r.to_dict()["answers"] for r in tried] == [{"right": 2, "of": 2}] * 9


def test_pruned_prompt_loses_answers(model, shared, monkeypatch):
    monkeypatch.setattr(answers, "ALPHA_HIGH", (1e6,))
    monkeypatch.setattr(answers, "ALPHA_LOW", (1e5,))
    monkeypatch.setattr(answers, "ONE_IN", 1)
    _, (_, second) = answers.measure(model, [shared], SHAPE, BLOCK, Progress())
    record = second.to_dict()
    assert record["pruned"] > 0.9 and sum(record[k] for k in ("high", "low", "pruned")) == pytest.approx(1)
    assert record["answers"]["right"] < record["answers"]["of"] == 2


def test_pruned_tokens_are_not_seen(model, shared):
    policy, layout = answers.geometry(SHAPE, BLOCK)
    prompt = answers.exact_prompt(model, shared, layout, lambda layer: None)
    tiers = [torch.full((KV_HEADS, 2 * BLOCK), 2, dtype=torch.int8) for _ in range(LAYERS)]
    tiers[0][:, BLOCK:] = 0
    packed = thresholds.stored(prompt, tiers, layout, policy)
    q, k, v = (torch.randn(h, 5, DIM) for h in (HEADS, KV_HEADS, KV_HEADS))
    got = thresholds.after_prompt(packed)(0, q, k, v, 0.1)
    keys, values = (torch.cat((x[0][:, :BLOCK], new), 1) for x, new in ((packed.k, k), (packed.v, v)))
    torch.testing.assert_close(got, causal(q, keys, values, 0.1))


def test_file_and_table_have_answers(model, ids, shared, tmp_path):
    path = str(tmp_path / "c.safetensors")
    result = calibrate(model, ids, block=BLOCK, prompts=[shared])
    result.save(path)
    findings = verdicts.read(path)
    assert findings is not None and findings.settings["answers"] == {"prompts": 1, "items": 3}
    assert all(r["answers"]["of"] == 2 and "kl_mean" not in r for r in findings.tried)
    t = findings.thresholds
    assert (t.alpha_high, t.alpha_low) == (result.chosen.alpha_high, result.chosen.alpha_low)
    tried = (
        {"alpha_high": 3.0, "alpha_low": 0.0, "answers": {"right": 9, "of": 10}},
        {"alpha_high": 3.0, "alpha_low": 0.1, "answers": {"right": 8, "of": 10}},
    )
    findings = verdicts.Findings(findings.identity, {}, (), "bf16", verdicts.Chosen(3.0, 0.1, "k8v4", "k4v2"), tried)
    assert command.table(findings).endswith("\n  3, 0: 9 of 10 answers kept\n  3, 0.1: 8 of 10 answers kept")


class Characters:
    """A tokenizer with a first token 1, then one token per character; spaces have none."""

    def __call__(self, text, add_special_tokens=True, verbose=True):
        return SimpleNamespace(input_ids=[1] * add_special_tokens + [ord(c) for c in text if c != " "])


def prompts(tmp_path, *lines, longest=None):
    path = tmp_path / "answers.jsonl"
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return answer_items.shared_prompts(answer_items.read(str(path)), Characters(), 4, longest)


def test_whole_blocks_of_context_or_prompt_are_planned(tmp_path):
    a, b, c = "abcdefg", "abc", "abcde"
    got = prompts(
        tmp_path,
        {"context": a, "prompt": "x", "answer": "yz"},
        {"prompt": a, "answer": "u"},
        "",
        {"context": a, "prompt": "w", "answer": "v"},
        {"prompt": b, "answer": "v"},  # its only block ends with the token that predicts the answer
        {"prompt": c, "answer": "v"},
    )
    assert [(p.planned, len(p.ids)) for p in got] == [(8, 8), (4, 8), (4, 6)]
    assert got[0].questions == [Question(tuple(map(ord, "xyz")), 2), Question(tuple(map(ord, "wv")), 1)]
    assert got[1].questions == [Question(tuple(map(ord, "defgu")), 1)]


GOOD = {"context": "abcdefgh", "prompt": "x", "answer": "y"}


@pytest.mark.parametrize(
    "line, words",
    [
        ("{", "line 2 .* is not a JSON object"),
        ("[1]", "line 2 .* is not a JSON object"),
        ({"answer": "y"}, 'line 2 .* has no text "prompt"'),
        ({"prompt": "x", "answer": ""}, 'line 2 .* has no text "answer"'),
        ({**GOOD, "context": 3}, 'line 2 .* has no text "context"'),
        ({**GOOD, "answer": " "}, "a text in line 2 .* has no tokens"),
        ({**GOOD, "prompt": "x" * 20}, "line 2 .* has 30 tokens, more than the 29"),
    ],
    ids=str,
)
def test_bad_lines_are_rejected(tmp_path, line, words):
    with pytest.raises(CalibrateError, match=words + ".*; give"):
        prompts(tmp_path, GOOD, line, longest=29)


def test_unreadable_and_short_files_are_rejected(tmp_path):
    with pytest.raises(CalibrateError, match=r"--answers .*absent cannot be read .*; give"):
        answer_items.read(str(tmp_path / "absent"))
    for lines in ([], [{"prompt": "ab", "answer": "y"}]):
        with pytest.raises(CalibrateError, match="has a whole block of 4 tokens; give"):
            prompts(tmp_path, *lines)


def test_answers_that_model_does_not_give_are_rejected(model, shared):
    wrong = SharedPrompt(shared.ids, shared.planned, shared.questions[1:2])
    with pytest.raises(CalibrateError, match="the exact cache gives no answer of --answers; give"):
        answers.measure(model, [wrong], SHAPE, BLOCK, Progress())
