"""The record of a calibration."""

from __future__ import annotations

from bench.quality import calibrate
from sglang_kvc.calibration.model_fingerprint import Identity
from sglang_kvc.calibration.verdicts import Chosen, Findings

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
