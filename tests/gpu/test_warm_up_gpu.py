"""After a warm-up nothing that a server launches is compiled."""

import pytest
import torch
from triton.runtime.jit import JITFunction

from kvc_kernels.ops import nvrtc
from sglang_kvc.warm_up import warm_up

from ..test_warm_up import COLUMNS, CONFIGURATIONS, GROUP, HEADS, REQUESTS, build, serve

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=lambda x: "-".join(map(str, x.values())))
def test_nothing_is_compiled_while_serving(options, monkeypatch):
    runtime = build(options, device="cuda")
    warm_up(runtime, caps={0.0}, query_heads=HEADS * GROUP, max_batch=REQUESTS, max_blocks=COLUMNS)
    compiled, compile_it = [], JITFunction._do_compile

    def count(self, *args, **options):
        compiled.append(self.__name__)
        return compile_it(self, *args, **options)

    monkeypatch.setattr(JITFunction, "_do_compile", count)
    monkeypatch.setattr(nvrtc, "compile_source", lambda *source: pytest.fail("CUDA C++ is compiled while serving"))
    serve(runtime, 0.0)
    torch.cuda.synchronize()
    assert not compiled
