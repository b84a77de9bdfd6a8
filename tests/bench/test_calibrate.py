"""The record of a calibration."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from bench.quality import calibrate
from bench.quality.tasks import Maker
from sglang_kvc.calibration.model_fingerprint import Identity
from sglang_kvc.calibration.verdicts import Chosen, Findings

from .test_tasks import Words, text

FORMATS = ({"format": "k4v4", "kl_mean": 0.01, "verdict": "ok"},)


def test_record_holds_findings_and_time(monkeypatch):
    identity = Identity("Llama", layers=2, heads=4, kv_heads=2, head_dim=64, fingerprint="f")
    findings = Findings(identity, {"tokens": 512}, FORMATS, "k4v4", Chosen(5.0, 0.1, "k8v4", "k4v2"))
    written = {}
    monkeypatch.setattr("sys.argv", ["calibrate", "--model", "smollm2"])
    monkeypatch.setattr(calibrate.fetch, "essays", lambda: "essays.txt")
    monkeypatch.setitem(calibrate.fetch.MODELS, "smollm2", lambda: "folder")
    monkeypatch.setattr(calibrate.command, "run", lambda *args, **options: findings)
    monkeypatch.setattr(calibrate.command, "table", lambda report: "")
    monkeypatch.setattr(calibrate, "shares", lambda path: {"layer_shares": []})
    monkeypatch.setattr(calibrate.common, "write_result", lambda name, numbers: written.update({name: numbers}))
    calibrate.main()
    numbers = written["calibrate/smollm2"]
    assert numbers["formats"] == FORMATS and numbers["recommended"] == "k4v4" and numbers["seconds"] >= 0
    assert numbers["thresholds"]["alpha_high"] == 5.0 and numbers["identity"]["layers"] == 2


class Characters(Words):
    def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces):
        assert not (skip_special_tokens or clean_up_tokenization_spaces)
        return text(ids)


def test_items_are_questions_of_benchmark():
    essays = "A sentence about " + " ".join(a + b + "ta" for a in "bdfgklmn" for b in ("an", "el", "im", "or")) + "."
    args = SimpleNamespace(tasks=["niah", "kv"], contexts=2, first=500, length=1500)
    items = [json.loads(line) for line in calibrate.items(Characters(), essays, args).splitlines()]
    assert len(items) == 2 * 2 * 8
    context = Maker(Characters(), essays).needles(501, 1500)
    for item, question in zip(items[8:16], context.questions, strict=True):
        assert (item["context"], item["prompt"]) == (text(context.ids), text(question.ask))
        assert item["answer"] == f" {question.answer}"


def test_tasks_without_one_answer_are_rejected(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["calibrate", "--answers-of", "niah,nll"])
    with pytest.raises(SystemExit):
        calibrate.main()
    assert "choose niah, kv" in capsys.readouterr().err
