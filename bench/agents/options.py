"""Options by which servers of agents are compared, written like `share-0.5+interval-4`.

`share-0.5` is `--kvc-running-share 0.5`, `floor-k4v2` is `--kvc-floor k4v2`, `reuse` is `--kvc-eviction reuse`,
`interval-4` is SGLang's `--prefill-decode-interval 4`, and `mixed` its `--enable-mixed-chunk`. `done` and `steps` are
hints of the clients, who know each pause to the nearest step of a workflow. `default` has no option.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.agents.orders import STEP
from bench.agents.traces import Step
from sglang_kvc.options.config import REUSE, KvcConfig
from sglang_kvc.options.request_hints import DONE, STEPS

DEFAULT = "default"


@dataclass(frozen=True)
class Options:
    """Options of one server and the hints of its clients, by the names above."""

    share: float | None = None
    interval: int = 0
    mixed: bool = False
    floor: str | None = None
    reuse: bool = False
    done: bool = False
    steps: bool = False

    @classmethod
    def parse(cls, text: str) -> Options:
        """`share-0.5+interval-4+mixed`; ValueError or TypeError for anything else."""
        kinds, given = {"share": float, "interval": int, "floor": str}, {}
        for part in text.split("+") if text != DEFAULT else ():
            name, _, value = part.partition("-")
            given[name] = kinds[name](value) if name in kinds else True
        return cls(**given)

    def config(self, host_memory: int) -> KvcConfig:
        eviction = REUSE if self.reuse else KvcConfig.eviction
        return KvcConfig(
            window=0, running_share=self.share, host_memory=host_memory, floor=self.floor, eviction=eviction
        )

    def flags(self) -> list[str]:
        """Options of `sglang.launch_server`, without those that have their default."""
        flags = ["--kvc-running-share", f"{self.share:g}"] if self.share is not None else []
        flags += ["--prefill-decode-interval", str(self.interval)] if self.interval else []
        flags += ["--enable-mixed-chunk"] if self.mixed else []
        flags += ["--kvc-floor", self.floor] if self.floor else []
        return flags + (["--kvc-eviction", REUSE] if self.reuse else [])

    def hints(self, steps: Sequence[Step], at: int, scale: float) -> dict[str, Any]:
        """Hints with the prompt of step `at` of a session whose pauses were multiplied by `scale`."""
        last = at + 1 == len(steps)
        hints: dict[str, Any] = {DONE: True} if self.done and last else {}
        if self.steps and not last:
            hints[STEPS] = round(steps[at + 1].pause / (STEP * scale))
        return hints
