"""Benchmarks of the kernels. They also run from a bare checkout, where the package is not installed."""

import pathlib
import sys

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[2] / "kernels")]
