"""Comparison of two devices' answers without a server: which differences count as rounding, and which fail the
check."""

from __future__ import annotations

import math
import sys

import pytest

from bench.client import Answer
from bench.serve import devices

PROMPTS = [[1, 2, 3, 4]] * 6


def answer(*tokens: int, shift: float = 0.0, second: float = 0.3) -> dict:
    """A greedy answer with `tokens`; the runner-up has probability `second`, and `shift` is added to all
    log-probabilities."""
    first = math.log(0.99 - second) + shift
    top = [{t: first, 900 + i: math.log(second) - shift} for i, t in enumerate(tokens)]
    return devices.pack(Answer("", list(tokens), 4, 0, {}, logprobs=[first] * len(tokens), top=top))


def run(*tokens: int, warm: dict | None = None, **options) -> dict[str, list]:
    cold = answer(*tokens, **options)
    return {"cold": [cold] * 6, "warm": [warm or cold, None, None] * 2}


def test_recording_keeps_compared_fields():
    kept = answer(5, 6)
    again = devices.unpack(kept)
    assert again.ids == [5, 6] and again.top[1].keys() == {6, 901} and devices.pack(again) == kept


def test_equal_answers_have_zero_distance():
    row = devices.agreement(run(5, 6, 7), run(5, 6, 7))
    assert row["agreement"] == row["same_answers"] == 1 and row["kl_mean"] == row["parted"] == 0
    assert row["prompts"] == 8 and row["cold"]["prompts"] == 6 and row["warm"]["prompts"] == 2
    assert devices.too_far({"stock": row, "k4v4": {**row, "cost": 0.0}}) == []


def test_comparison_stops_where_answers_diverge():
    parted = {"cold": [answer(5, 901, 7, shift=-0.4)] * 6, "warm": [answer(5, 6, 7)] + [None] * 5}
    row = devices.agreement(run(5, 6, 7), parted)
    # Six cold answers differ in the second token, and one warm answer is equal.
    assert row["positions"] == 6 * 2 + 3 and row["agreement"] == (6 + 3) / 15 and row["parted"] == 6
    assert row["warm_as_cold"] == {"reference": "2/2", "here": "0/1"}
    unlisted = devices.agreement(run(5, 6, 7), run(5, 555, 7))
    assert set(unlisted["gaps"]) == {"not among the best"} and unlisted["ties"] == 0


def test_cache_may_differ_slightly_more_than_stock():
    near, far = ({**devices.agreement(run(5, 6), run(5, 6, shift=s)), "cost": 0.0} for s in (0.001, 0.4))
    assert 0 < near["kl_mean"] < devices.SLACK < far["kl_mean"]
    assert devices.too_far({"stock": near, "k4v4": near}) == []
    failed = devices.too_far({"stock": near, "bf16": near, "k4v4": far})
    assert len(failed) == 1 and failed[0].startswith("k4v4: mean KL")
    assert devices.too_far({"stock": far, "k4v4": far}) == []
    assert devices.too_far({"stock": near, "k4v4": {**far, "cost": 3 * far["kl_mean"]}}) == []
    assert devices.too_far({"k4v4": far}) and not devices.too_far({"k4v4": near})
    assert devices.too_far({"stock": near, "k4v4": {"kl_mean": math.nan, "cost": 0.0}})


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs `main` on made-up answers, `{cache: answers}`, with options; returns its exit status."""
    monkeypatch.setattr(devices, "texts", lambda *a: PROMPTS)
    monkeypatch.setattr(devices.prompts, "tokenizer", lambda folder: None)
    monkeypatch.setitem(devices.fetch.MODELS, "smollm2", lambda: tmp_path)

    def call(caches: dict[str, dict], *options: str) -> int:
        def ask(cache, args, prompts):
            if cache not in caches:
                raise RuntimeError("the server did not start")
            assert prompts == PROMPTS[: args.prompts]
            return caches[cache]

        monkeypatch.setattr(devices, "ask", ask)
        monkeypatch.setattr(sys, "argv", ["devices", "--caches", "stock,k4v4", *options])
        return devices.main()

    return call


def test_command_records_and_compares(command, tmp_path, capsys):
    file, result = str(tmp_path / "cpu.json.gz"), tmp_path / "devices.json"
    good = {"stock": run(5, 6), "k4v4": run(5, 6)}
    compare = ["--against", file, "--result", str(result)]
    assert command(good, "--record", file) == 0
    assert command(good, *compare) == 0
    assert result.exists() and "devices_agreement.k4v4" in result.read_text()
    assert command({**good, "k4v4": run(5, 6, shift=0.4)}, *compare) == 1
    assert command({"k4v4": run(5, 6)}, *compare) == 1
    assert "stock: the server did not start" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command(good, *compare, "--caches", "leankv")
