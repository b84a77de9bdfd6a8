"""Kernel benchmarks. They also run from a checkout without an installed package."""

import pathlib
import sys

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[2] / "kernels")]
