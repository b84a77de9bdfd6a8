"""The command line of this process, for code that runs before SGLang parses its arguments.

SGLang spawns its scheduler processes, and Python gives them the command line of the server.
"""

from __future__ import annotations

import sys
from itertools import pairwise

CPU_PLATFORM = "kvc_cpu"  # entry point of the CPU platform, and value of SGLANG_PLATFORM


def names_backend() -> bool:
    """Whether the command line, or the file of its `--config`, gives `--kv-backend`, with any value."""
    argv = sys.argv[1:]
    if any(arg.split("=", 1)[0] == "--kv-backend" for arg in argv):
        return True
    return any(_file_names_backend(path) for flag, path in pairwise(argv) if flag == "--config")


def _file_names_backend(path: str) -> bool:
    import yaml  # late: needed only with --config

    try:
        with open(path) as file:
            settings = yaml.safe_load(file)
    except (OSError, ValueError, yaml.YAMLError):
        return False  # SGLang reports it
    return isinstance(settings, dict) and any(str(key).replace("_", "-") == "kv-backend" for key in settings)
