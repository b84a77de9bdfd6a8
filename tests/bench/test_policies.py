"""The quality harness without a server: its cells, its refusals, and its handling of failed cells."""

from __future__ import annotations

import json
from dataclasses import fields
from types import SimpleNamespace

import pytest

from bench import common
from bench.quality import asking, cells, generation, pareto, policies
from sglang_kvc.calibration.model_fingerprint import Identity
from sglang_kvc.policies.registry import PRESETS

MODEL = Identity("LlamaForCausalLM", layers=4, heads=4, kv_heads=2, head_dim=64, fingerprint="none")


def refusal(name: str, calibration=None) -> str | None:
    return cells.refusal(name, MODEL, 128, calibration)


def test_every_preset_has_measured_cell(tmp_path):
    file = calibration(tmp_path)
    measured = {n.split("+")[0] for n in cells.names() if refusal(n, file) is None}
    assert {p.name for p in PRESETS} <= measured | set(cells.RECOMMENDED)
    assert set(cells.RECOMMENDED.values()) <= set(cells.names())
    assert len(cells.names()) == len(set(cells.names()))


def test_presets_equal_recommended_cells():
    from sglang_kvc.options.resolve import resolve_config
    from sglang_kvc.policies import make_policy

    def plan(name: str):
        settings = {f"kvc_{k}": v for k, v in common.kvc_settings(name).items()}
        policy = make_policy(resolve_config(SimpleNamespace(**settings)))
        return {f.name: getattr(policy, f.name) for f in fields(policy)}

    for preset in ("safe", "balanced", "max"):
        assert plan(preset) == plan(cells.RECOMMENDED[preset])


def test_lost_points_become_scores():
    marks = {"em": 18 / 24, "of": 24, "right_to_wrong": 7, "wrong_to_right": 1}
    scores = cells.scores({"k4v4": {"niah": marks, "ratio_body": 3.6, "kl": {"p99": 0.04}}}, "smollm2")
    score = scores["quality.balanced.smollm2.niah.delta"]
    assert score[:3] == (-25.0, "points of 24 questions", "stock bf16 of the same run")
    assert score.low < -40 and -5 < score.high < 0
    assert scores["quality.balanced.smollm2.all.delta"].value == -25.0
    ruler = cells.scores({"k4v4": {"vt": marks, "cwe": marks}}, "smollm2", length=cells.LONG)
    assert set(ruler) == {f"quality.32k.balanced.smollm2.{task}.delta" for task in ("vt", "cwe")}
    assert scores["quality.balanced.smollm2.kl_p99"].value == 0.04 and not any("safe" in name for name in scores)


def test_refusals_give_reason():
    assert "Nothing is dropped" in refusal("quota+budget=2x")
    assert "no token is dropped" in refusal("mikv+budget=8x")
    assert "no file was given" in refusal("xkv+budget=4x")
    assert refusal("stock") is refusal("quota+budget=4x") is None


def test_front_contains_only_undominated_points():
    points = {"big": (10.0, 1.0), "small": (2.0, 0.5), "worse": (3.0, 0.4), "same": (3.0, 0.5)}
    assert pareto.front(points, more=True) == ["small", "big"]
    assert pareto.front({"a": (1, 0.2), "b": (2, 0.3), "c": (3, 0.1)}, more=False) == ["a", "c"]


def test_presses_count_kept_tokens_at_16_bits():
    rows = {"stock": {"bytes_body": 12288}}
    press_rows = [{"press": "full", "keep": 1.0}, {"press": "snapkv", "keep": 0.25, "kv": {"em": 0.5}}]
    press_rows.append({"press": "random", "keep": 0.25, "error": "no time left"})
    expected = {"kvpress snapkv+keep=0.25": {"bytes_body": 3072, "kv": {"em": 0.5}}}
    assert pareto.presses(rows, {"rows": press_rows}) == expected


class FakeServer(common.Server):
    """A server without answers; the cells of one policy do not start."""

    def start(self):
        if "quota" in self.args:
            raise common.ServerError("the server ended with code 1:\nno such thing")

    def errors(self):
        return []


def fake_measure(server, cell, work, args, out):
    if "random" in server.args:
        raise policies.CellError("too few tokens cached")
    shift = 0.0 if "default" in server.args else 0.1
    out |= {"accounts": {}, "niah": [[True, not shift]], "kv": [[True, False]], "nll": [3.0 + shift]}
    return [[{7: -0.1 - shift, 8: -2.5}]]


@pytest.fixture
def harness(monkeypatch, tmp_path):
    monkeypatch.setattr(common, "Server", FakeServer)
    monkeypatch.setattr(policies, "measure", fake_measure)
    argv = ["--model-path", str(tmp_path), "--device", "cpu", "--out", str(tmp_path / "found.json"), "--parallel", "2"]
    args = policies.arguments(argv)
    return policies.Harness(args, MODEL, None, {}, {})


def test_failed_cell_does_not_stop_others(harness, tmp_path):
    harness.run(["k4v4", "quota+budget=4x", "random+budget=4x", "xkv+budget=4x", "stock"])
    record = json.loads(harness.report().read_text())
    numbers = record["numbers"]
    assert list(numbers["cells"]) == ["stock", "k4v4"] and numbers["reference"] == "stock"
    assert set(numbers["failed"]) == {"quota+budget=4x", "random+budget=4x"}
    assert set(numbers["refused"]) == {"xkv+budget=4x"}
    row = numbers["cells"]["k4v4"]
    assert row["niah"]["right_to_wrong"] == 1 and row["nll"]["delta"] == pytest.approx(0.1)
    assert row["kl"]["mean"] > 0 == numbers["cells"]["stock"]["kl"]["mean"]
    assert "k4v4" in pareto.table(numbers["cells"])
    pytest.importorskip("matplotlib")
    pareto.plot(record, tmp_path / "front.png")
    assert (tmp_path / "front.png").stat().st_size > 10_000


def test_run_resumes_where_it_ended(harness):
    harness.run(["stock", "k4v4"])
    a = harness.args
    a.resume = True
    again = policies.Harness(a, MODEL, None, *policies.earlier_cells(a))
    assert set(again.raw) == {"stock", "k4v4"} and set(again.tops) == {"stock"}
    again.run(["stock", "k4v4", "k8v8"])
    assert again.raw["k8v8"]["kl"]["reference"] == "stock"


class Recorder:
    """A server that records its requests."""

    def __init__(self):
        self.client, self.sent = self, []

    def generate(self, prompt, tokens, **options):
        self.sent.append((tuple(prompt), options))
        return SimpleNamespace(ids=[1], text="right", cached_tokens=0)

    def flush(self):
        raise AssertionError("no context comes first")


@pytest.mark.parametrize(
    ("cell", "level", "apart"),
    [
        ("stock", None, False),
        ("k4v4", None, False),
        ("kv-compress", None, True),
        ("k4v4@one-shot:8x", "one-shot:8x", False),
    ],
)
def test_seen_protocol_sends_question_in_prompt(harness, monkeypatch, cell, level, apart):
    harness.args.protocol, server = "seen", Recorder()
    task = SimpleNamespace(tokens=None, free=False, right=lambda answer, text: answer == text)
    monkeypatch.setitem(asking.TASKS, "niah", task)
    questions = [SimpleNamespace(ask=[i], answer=a) for i, a in enumerate(("right", "wrong"))]
    contexts = [SimpleNamespace(name="one", ids=[7, 8], questions=questions)]
    right, lengths, account = asking.ask(server, cell, "niah", contexts, harness.args)
    assert (right, lengths, account) == ([[True, False]], [[1, 1]], {})
    assert sorted(prompt for prompt, _ in server.sent) == [(7, 8, 0), (7, 8, 1)]
    for _, options in server.sent:
        assert options["sampling"].get("custom_params") == (level and {"kvc": level})
    keys = {options.get("extra_key") for _, options in server.sent}
    assert (len(keys) == 2 and None not in keys) if apart else keys == {None}
    assert cells.refusal(cell, MODEL, 128, None) is None


class Cached(Recorder):
    """A server that keeps prompts until a flush, and packs all of them."""

    def generate(self, prompt, tokens, **options):
        hit = max((len(p) for p, _ in self.sent if tuple(prompt[: len(p)]) == p), default=0)
        self.sent.append((tuple(prompt), options))
        self.most = max(self.most, len(self.sent))
        return SimpleNamespace(ids=[1], text="right", cached_tokens=hit)

    def flush(self):
        self.sent, self.most = [], getattr(self, "most", 0)

    def stats(self):
        return {}


def test_unseen_protocol_caches_a_group_of_contexts_at_a_time(harness, monkeypatch):
    harness.args.protocol, harness.args.contexts, harness.args.block, server = "unseen", 2, 2, Cached()
    task = SimpleNamespace(tokens=None, free=False, right=lambda answer, text: answer == text)
    monkeypatch.setitem(asking.TASKS, "niah", task)
    answers = ["right", "wrong", "right", "right", "wrong"]
    contexts = [
        SimpleNamespace(name=str(i), ids=[i, i], questions=[SimpleNamespace(ask=[9], answer=a)])
        for i, a in enumerate(answers)
    ]
    right, *_ = asking.ask(server, "stock", "niah", contexts, harness.args)
    assert right == [[a == "right"] for a in answers]
    assert server.most == 4  # two contexts, and a question about each
    monkeypatch.setattr(server, "flush", lambda: setattr(server, "sent", []))
    monkeypatch.setattr(asking, "load", lambda *_: {})
    with pytest.raises(asking.CellError, match="0 tokens cached, not 2"):
        asking.ask(server, "stock", "niah", contexts, harness.args)


def test_one_shot_scores_are_lost_points():
    marks = {"right_to_wrong": 3, "wrong_to_right": 1, "of": 100, "em": 0.9}
    scores = cells.one_shot_scores({"stock": {}, "k4v4": {"kv": marks}, "k4v4@one-shot:16x": {"kv": marks}}, "m")
    assert list(scores) == ["papers.oneshot.16x.m.kv.delta"]
    assert scores["papers.oneshot.16x.m.kv.delta"].value == pytest.approx(-2)


def test_pruned_share_is_zero_with_a_significant_loss():
    same, lost = ({"right_to_wrong": n, "wrong_to_right": 1, "of": 100, "em": 0.9} for n in (1, 20))
    score = cells.pruned_share({"kept": 0.9, "kv": same, "niah": same}, "leankv+alpha_low=0.04")
    assert score.value == pytest.approx(0.1)
    assert score.unit.endswith(", leankv+alpha_low=0.04, thresholds calibrated by answers")
    assert cells.pruned_share({"kept": 0.5, "kv": same, "niah": lost}, "leankv").value == 0


def test_calibrated_cell_has_exactly_the_chosen_thresholds():
    chosen = {"alpha_high": 1.0, "alpha_low": 0.04, "high": "k8v4", "low": "k4v2"}
    others = ["k4v4", "leankv", "leankv+alpha_high=5+alpha_low=0.04", "leankv+alpha_low=0.04+high=k4v4"]
    others += ["leankv+alpha_low=0.04+observe=64"]
    assert cells.calibrated_cell(others, chosen) is None
    assert cells.calibrated_cell([*others, "leankv+alpha_low=0.04"], chosen) == "leankv+alpha_low=0.04"
    explicit = "leankv+alpha_high=1+alpha_low=0.04"
    assert cells.calibrated_cell([explicit], chosen) == explicit
    assert cells.calibrated_cell(["leankv"], chosen | {"alpha_low": 0.02}) == "leankv"


def test_no_cell_starts_after_deadline(harness):
    harness.args.seconds = -1
    harness.run(["stock"])
    assert harness.not_started == ["stock"] and not harness.raw


def calibration(folder):
    import torch
    from safetensors.torch import save_file

    tensors = {
        "query_mean": torch.zeros(MODEL.layers, MODEL.heads, MODEL.head_dim),
        "query_covariance": torch.zeros(MODEL.layers, MODEL.heads, MODEL.head_dim, MODEL.head_dim),
        "query_samples": torch.zeros(MODEL.layers, MODEL.heads, 2, MODEL.head_dim),
        "rotary_frequencies": torch.ones(MODEL.head_dim // 2),
        "importance_retention": (torch.arange(1, 5) / 4).repeat(MODEL.layers, 1),
        "attention_entropy": torch.ones(MODEL.layers),
        "attention_shift": torch.ones(MODEL.layers),
        "head_retrieval": torch.ones(MODEL.layers, MODEL.kv_heads),
        "gate_in": torch.zeros(MODEL.layers, MODEL.kv_heads, 2, 2 * MODEL.head_dim),
        "gate_in_bias": torch.zeros(MODEL.layers, MODEL.kv_heads, 2),
        "gate_out": torch.zeros(MODEL.layers, MODEL.kv_heads, 2),
        "gate_out_bias": torch.zeros(MODEL.layers, MODEL.kv_heads),
    }
    save_file(tensors, folder / "calibration.safetensors")
    return folder / "calibration.safetensors"


def test_generations_are_compared_with_stock():
    """The estimate is the mean gap of log-probabilities; quarters follow the continuation."""
    texts = [([7] * 8, [-1.0] * 4 + [-2.0] * 4), ([7] * 8, [-1.0] * 8)]
    summary = generation.summary(texts, [[-1.5] * 8, [-1.0] * 8])
    assert summary["tokens"] == 16 and summary["nats"] == pytest.approx(0)
    assert summary["quarters"] == pytest.approx([0.25, 0.25, -0.25, -0.25])
    assert summary["standard_error"] == pytest.approx(0)
