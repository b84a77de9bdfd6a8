"""The number of refused options is that of the table which the server checks, and of DP attention."""

import json

from bench import common, refused
from sglang_kvc.options.unsupported_args import ARG_REFUSALS


def test_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    refused.main()
    record = json.loads((tmp_path / "refused.json").read_text())
    names = {r.name for r in ARG_REFUSALS} | {"enable_dp_attention", "attn_dp_size"}
    assert record["scores"]["current.refused_options"]["value"] == len(names)
    assert record["scores"]["current.sglang"]["value"] == 5.23
    assert "--pp-size" in record["numbers"]["options"]
