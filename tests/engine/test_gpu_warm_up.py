"""After a warm-up nothing that a server launches is compiled."""

import pytest
import torch
from triton.runtime.jit import JITFunction

from kvc_kernels.common import nvrtc
from sglang_kvc.engine.warm_up import warm_up

from .test_warm_up import CONFIGURATIONS, WINDOWED, build, serve, sizes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(
    "options, window", [*((x, -1) for x in CONFIGURATIONS), *((x, 70) for x in WINDOWED)],
    ids=lambda x: "-".join(map(str, x.values())) if isinstance(x, dict) else str(x),
)  # fmt: skip
def test_nothing_is_compiled_while_serving(options, window, monkeypatch):
    runtime = build(options, device="cuda")
    warm_up(runtime, kinds={(-1, 0.0), (window, 0.0)}, **sizes(window))
    compiled, compile_it = [], JITFunction._do_compile

    def count(self, *args, **options):
        compiled.append(self.__name__)
        return compile_it(self, *args, **options)

    monkeypatch.setattr(JITFunction, "_do_compile", count)
    monkeypatch.setattr(nvrtc, "compile_source", lambda *source: pytest.fail("CUDA C++ is compiled while serving"))
    serve(runtime, 0.0, window)
    torch.cuda.synchronize()
    assert not compiled
