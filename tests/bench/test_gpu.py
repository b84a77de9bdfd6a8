"""The runner of all GPU steps: a step past its time limit is stopped, and every step accepts its options."""

import runpy
import signal
import sys
import time
from argparse import Namespace

import pytest

from bench import gpu

# Stands in for a step with a server; writes a file when it is stopped cleanly.
HOLD = """
import sys, time
try:
    time.sleep(60)
except KeyboardInterrupt:
    open(sys.argv[1], "w").write("stopped")
    raise
"""


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.default_int_handler])
def test_step_past_its_time_limit_is_interrupted(handler, tmp_path, capsys, request):
    """This holds even if this process ignores interrupts, as background jobs of a shell do."""
    before = signal.signal(signal.SIGINT, handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    step = gpu.Step("hold", [sys.executable, "-c", HOLD, str(tmp_path / "hold")], 3, gpu.TIMED)
    began = time.monotonic()
    assert gpu.run_all([step], ["0"], tmp_path) == 1 and time.monotonic() - began < 40
    assert (tmp_path / "hold").read_text() == "stopped"
    assert "not done after 3 s" in capsys.readouterr().out


@pytest.mark.slow
def test_every_step_accepts_its_options(monkeypatch, capsys):
    """Each step is a module that accepts the options it is given."""
    nothing = Namespace(model="", load_format="auto", data="", traces="", stock_backends="fa3")
    without = [s.name for s in gpu.steps(nothing)]
    assert "serving" not in without and "decode" in without
    chosen = gpu.steps(Namespace(model="m", load_format="dummy", data="d", traces="t", stock_backends="fa3"))
    assert [s.kind for s in chosen] == sorted(s.kind for s in chosen)
    for step in chosen:
        if step.name in ("tests", "served", "sanitizer"):
            continue
        python, flag, module, *options = step.command
        assert [python, flag] == gpu.PYTHON
        monkeypatch.setattr(sys, "argv", [module, *options, "--help"])
        with pytest.raises(SystemExit) as end:
            runpy.run_module(module, run_name="__main__")
        shown = capsys.readouterr().out
        assert not end.value.code and all(word in shown for word in options if word.startswith("--")), step.command
