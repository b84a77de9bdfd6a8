"""The number of refused options equals that of the table that the server checks."""

import json

import pytest

from bench import common, defects, refused
from sglang_kvc.options.unsupported_args import ARG_REFUSALS


def test_refused_options_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    refused.main([])
    record = json.loads((tmp_path / "refused.json").read_text())
    assert record["scores"]["current.refused_options"]["value"] == len({r.name for r in ARG_REFUSALS})
    assert record["scores"]["current.sglang"]["value"] == 5.23
    assert "--pp-size" in record["numbers"]["options"]


@pytest.mark.parametrize("bench", [defects, refused], ids=["defects", "refused"])
@pytest.mark.parametrize("argument, code", [("--help", 0), ("--quik", 2), ("--quick", None)])
def test_arguments_other_than_none_leave_results_alone(bench, argument, code, tmp_path, monkeypatch):
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(defects, "known", lambda: ["tests/test_x.py:4"])
    if code is None:
        bench.main([argument])
    else:
        with pytest.raises(SystemExit) as e:
            bench.main([argument])
        assert e.value.code == code
    assert not list(tmp_path.iterdir())
    bench.main([])
    assert [file.name for file in tmp_path.iterdir()] == [f"{bench.__name__.removeprefix('bench.')}.json"]
