"""A calibration on the GPU gives the results of one on the CPU."""

import pytest
import torch

from .conftest import BLOCK, make_ids, make_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_both_devices_agree():
    from sglang_kvc.calibration.measure.passes import calibrate

    on_gpu = calibrate(make_model().cuda(), make_ids().cuda(), block=BLOCK)
    on_cpu = calibrate(make_model(), make_ids(), block=BLOCK)
    assert on_gpu.settings["device"] == "cuda"
    for name, x in on_cpu.tensors.items():
        torch.testing.assert_close(on_gpu.tensors[name], x, rtol=0.02, atol=0.02)
    for a, b in zip(on_gpu.formats, on_cpu.formats):
        assert (a.format, a.token_bytes) == (b.format, b.token_bytes)
        assert a.difference.kl_mean == pytest.approx(b.difference.kl_mean, rel=0.1, abs=1e-3)
