"""The runner of all that needs a GPU: order, GPUs, what is out of time."""

import os
import signal
import subprocess
import sys
import time
from argparse import Namespace

import pytest

from bench import gpu
from bench.common import ROOT

SAY = "import os, sys, time; time.sleep(float(sys.argv[2])); "
SAY += "open(sys.argv[1], 'a').write(os.environ['CUDA_VISIBLE_DEVICES'] + '\\n')"
# Ends well behind another step, whose file it waits for.
BEHIND = "import os, sys, time\nwhile not os.path.exists(sys.argv[3]): time.sleep(0.01)\n" + SAY
# What holds a server: it says when it was stopped in order.
HOLD = """
import sys, time
try:
    time.sleep(60)
except KeyboardInterrupt:
    open(sys.argv[1], "w").write("stopped")
    raise
"""


def say(name, kind, said, seconds=0.0, code=SAY, *more):
    return gpu.Step(name, [sys.executable, "-c", code, str(said / name), str(seconds), *more], 20, kind)


@pytest.mark.parametrize("gpus", [["0"], ["2", "5"]])
def test_order_and_gpus(gpus, tmp_path, capsys):
    slow = (1.5, BEHIND, str(tmp_path / "quick")) if len(gpus) > 1 else (0.5,)
    chosen = [
        say("whole", gpu.WHOLE, tmp_path), say("right", gpu.RIGHT, tmp_path),
        say("slow", gpu.TIMED, tmp_path, *slow), say("quick", gpu.TIMED, tmp_path),
        say("long", gpu.ALONE, tmp_path, 0.5), say("short", gpu.ALONE, tmp_path),
        say("broken", gpu.TIMED, tmp_path, code="raise SystemExit(3)"),
    ]  # fmt: skip
    assert gpu.run_all(chosen, gpus, tmp_path) == 1
    out = capsys.readouterr().out.splitlines()
    ended = [line.split()[0] for line in out]
    assert ended[:2] == ["long", "short"] and (tmp_path / "short").read_text().strip() == gpus[0]
    assert set(ended[2:5]) == {"slow", "quick", "broken"} and ended[5:] == ["right", "whole"]
    assert "FAILED with 3" in next(line for line in out if line.startswith("broken"))
    assert (ended.index("quick") < ended.index("slow")) == (len(gpus) > 1)
    assert (tmp_path / "whole").read_text().strip() == ",".join(gpus)
    used = {name: (tmp_path / name).read_text().strip() for name in ("slow", "quick", "right")}
    assert set(used.values()) <= {*gpus} and (len(gpus) == 1 or used["slow"] != used["quick"])


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.default_int_handler])
def test_one_that_is_out_of_time_is_interrupted(handler, tmp_path, capsys, request):
    """Also where this process was told to ignore interrupts, as a shell's background jobs are."""
    before = signal.signal(signal.SIGINT, handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    step = gpu.Step("hold", [sys.executable, "-c", HOLD, str(tmp_path / "hold")], 3, gpu.TIMED)
    began = time.monotonic()
    assert gpu.run_all([step], ["0"], tmp_path) == 1 and time.monotonic() - began < 40
    assert (tmp_path / "hold").read_text() == "stopped"
    assert "not done after 3 s" in capsys.readouterr().out


def test_every_step_is_there():
    """Each is a module that knows the options it is given, and its result is where the scoreboard looks."""
    without = [s.name for s in gpu.steps(Namespace(model="", load_format="auto", data="", stock_backends="fa3"))]
    assert "serving" not in without and "decode" in without
    chosen = gpu.steps(Namespace(model="m", load_format="dummy", data="d", stock_backends="fa3"))
    assert [s.kind for s in chosen] == sorted(s.kind for s in chosen)
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    for step in chosen:
        if step.name in ("tests", "served", "sanitizer"):
            continue
        done = subprocess.run([*step.command, "--help"], cwd=ROOT, env=env, capture_output=True, text=True)
        given = [word for word in step.command if word.startswith("--")]
        assert done.returncode == 0 and all(word in done.stdout for word in given), (step.command, done.stderr[-500:])
