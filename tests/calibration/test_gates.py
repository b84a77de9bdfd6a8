"""Gates learn a token's importance from its key and value, and are written to a file that a server reads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from kvc_kernels import ops
from kvc_kernels.layout import PoolLayout
from sglang_kvc.calibration import tensors as calibration
from sglang_kvc.calibration import verdicts
from sglang_kvc.calibration.measure import gates
from sglang_kvc.calibration.measure.capture import CalibrateError
from sglang_kvc.policies.scorers.gate import Gate

from .conftest import DIM, HEADS, KV_HEADS, LAYERS, make_ids, make_model


def test_target_is_largest_attention_of_later_queries():
    gen = torch.Generator().manual_seed(0)
    q, k = torch.randn(HEADS, 20, DIM, generator=gen), torch.randn(KV_HEADS, 20, DIM, generator=gen)
    got = gates.largest_attention(q, k, 0.3)
    for h in range(KV_HEADS):
        for i in range(20):
            attention = [0.0]
            for g in (2 * h, 2 * h + 1):
                for j in range(i + 1, 20):
                    e = np.exp(0.3 * (k[h, : j + 1] @ q[g, j]).double().numpy())
                    attention.append(e[i] / e.sum())
            assert float(got[h, i]) == pytest.approx(max(attention), rel=1e-4)


def test_training_recovers_rule():
    """Two heads have targets that are functions of their rows, with different offsets and scales."""
    gen = torch.Generator().manual_seed(1)
    x = torch.randn(2, 3000, 8, generator=gen)
    targets = torch.stack((x[0, :, 0].relu() - x[0, :, 1], 2 * x[1, :, 2].abs() - 5))
    rows = (x * torch.tensor([0.1, 1, 10, 1, 1, 1, 1, 1]) + torch.arange(8)).half()
    trained = gates.train(gates.Examples(rows[:, :2500], targets[:, :2500]), hidden=8, steps=400)
    assert gates.correlation(trained, gates.Examples(rows[:, 2500:], targets[:, 2500:])) > 0.95
    # The absolute level also counts, because heads compete.
    assert abs(float(ops.gate_scores(rows[1:, 2500:].float()[None, 0], *(g[1:] for g in trained)).mean()) + 3.4) < 0.3


@pytest.mark.slow
def test_gates_are_trained_from_model_to_file(tmp_path, monkeypatch):
    monkeypatch.setattr(gates, "PIECE", 192)
    monkeypatch.setattr(gates, "END", 32)
    tensors, seen = gates.gates(make_model(), make_ids(768), hidden=8, steps=150)
    assert seen > 0.3
    path = str(tmp_path / "calibration.safetensors")
    save_file({"query_mean": torch.ones(LAYERS, HEADS, DIM)}, path, metadata={"other": "stays"})
    gates.add_tensors(path, tensors)
    assert calibration.tensor_names(path) == {"query_mean", *Gate().needs}
    assert verdicts.read(path) is None
    calibration.check_shapes(path, Gate().needs, PoolLayout(LAYERS, KV_HEADS, DIM, 64, 1152))
    with pytest.raises(ValueError, match="does not fit"):
        calibration.check_shapes(path, Gate().needs, PoolLayout(LAYERS, KV_HEADS, 2 * DIM, 64, 1152))
    with pytest.raises(CalibrateError, match="longer"):
        gates.gates(make_model(), make_ids(300))


def test_model_with_another_rotation_gets_no_gates(monkeypatch):
    """A file with its frequencies would tell scorers to undo a rotation that the model does not have."""
    monkeypatch.setattr(gates, "rotary_frequencies", lambda model: torch.linspace(1, 3, DIM // 2))
    with pytest.raises(CalibrateError, match="cannot be undone"):
        gates.gates(make_model(), make_ids(2 * gates.PIECE), steps=1)


@pytest.mark.parametrize(
    "curve", [torch.zeros(2, 0), torch.tensor([[0.1, 0.3, 0.6, 1.0]] * 2), torch.full((2, 4), 5.0)], ids=str
)
def test_curves_that_are_no_retention_are_refused(tmp_path, curve):
    path = str(tmp_path / "c.safetensors")
    save_file({"importance_retention": curve}, path)
    with pytest.raises(ValueError, match="importance_retention"):
        calibration.check_shapes(path, ["importance_retention"], PoolLayout(2, 2, 32, 64, 1200))
