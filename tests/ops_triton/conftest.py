"""Triton kernels on the CPU, under Triton's interpreter.

The switch is read when triton is imported, and must not reach SGLang or the servers of other tests: so these files are
left out of a usual run, where `tests/test_ops_triton.py` runs them in a process of their own.
"""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
