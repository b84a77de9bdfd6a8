"""Servers of the longest prompts."""

import json
from itertools import pairwise
from types import SimpleNamespace

import pytest

from bench.serve import longest


def test_one_shot_levels_share_the_server_of_their_format():
    assert longest.by_server(["stock", "k8v4", "oneshot-8x", "k4v4"]) == {
        "stock": {"stock": None},
        "k8v4": {"k8v4": None},
        "k4v4": {"oneshot-8x": "one-shot:8x", "k4v4": None},
    }


@pytest.fixture
def model(tmp_path):
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("name", longest.by_server(list(longest.CELLS)))
def test_servers_have_equal_memory(name, model):
    args = SimpleNamespace(memory="1MiB", chunk=256, block=128, context=1 << 17)
    options = dict(pairwise(longest.server_options(name, model, args)))
    if name in longest.STOCK:
        element_bytes = 1 if name == "stock-fp8" else 2
        assert int(options["--max-total-tokens"]) * longest.token_bytes(model) * element_bytes // 2 == 1 << 20
    else:
        assert options["--kvc-memory"] == "1MiB" and options["--chunked-prefill-size"] == "256"
