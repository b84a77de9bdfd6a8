"""The number of refused options equals that of the table that the server checks."""

import json

from bench import common, refused
from sglang_kvc.options.unsupported_args import ARG_REFUSALS


def test_refused_options_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    refused.main()
    record = json.loads((tmp_path / "refused.json").read_text())
    assert record["scores"]["current.refused_options"]["value"] == len({r.name for r in ARG_REFUSALS})
    assert record["scores"]["current.sglang"]["value"] == 5.23
    assert "--pp-size" in record["numbers"]["options"]
