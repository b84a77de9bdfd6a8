"""Progress of a calibration: a percentage and the current phase, on stderr."""

from __future__ import annotations

from typing import TextIO


class Progress:
    """Counts steps, each one layer of one pass. A terminal gets one rewritten line per phase; a log, a line per 10 %.

    Without `out`, and before `begin`, nothing is printed.
    """

    def __init__(self, out: TextIO | None = None):
        self.out, self.total, self.done = out, 0, 0
        self._printed: tuple[str, int] = ("", -1)

    def begin(self, total: int) -> None:
        """Start a calibration of `total` steps."""
        self.total, self.done = total, 0

    def step(self, phase: str, layer: int, layers: int) -> None:
        """Count layer `layer` (from 0) of `layers` of this phase as done."""
        if self.out is None or not self.total:
            return
        self.done += 1
        percent = min(100, 100 * self.done // self.total)
        line = f"[{percent:3d} %] {phase}: layer {layer + 1} of {layers}"
        last = layer + 1 == layers
        if self.out.isatty():
            print(f"\r{line}\033[K", end="\n" if last else "", file=self.out, flush=True)
        elif last or self._printed != (phase, percent // 10):
            print(line, file=self.out, flush=True)
        self._printed = (phase, percent // 10)

    def end(self) -> None:
        """Finish; steps that were not needed count as done."""
        if self.out is not None and self.done < self.total:
            print("[100 %] done", file=self.out, flush=True)
