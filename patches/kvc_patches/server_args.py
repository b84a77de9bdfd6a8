"""Hooks into `sglang.srt.server_args` and `sglang.srt.entrypoints.engine`: the options of the plug-in.

Relies on SGLang 0.5.17:
- `class ServerArgs` (a dataclass; `prepare_server_args(argv)` reads the module global of that name);
- `add_attention_backend_choices(choices)` appends to the list that argparse holds by reference;
- `Engine.server_args_class`, a class attribute that the replacement of the module global does not reach.
"""

from __future__ import annotations

import sys

SGLANG_VERSIONS = ("0.5.17",)
BACKEND = "kvc"
SERVER_ARGS = "sglang.srt.server_args.ServerArgs"
ENGINE_MODULE = "sglang.srt.entrypoints.engine"


class UnsupportedSGLang(RuntimeError):
    """The installed SGLang is not one that these hooks were written for."""


def check_version() -> None:
    """Refuse an SGLang whose inside is not known, rather than patch it half."""
    from importlib.metadata import version

    found = version("sglang")
    if found in SGLANG_VERSIONS:
        return
    sentence = (
        f"sglang-kvc works with SGLang {', '.join(SGLANG_VERSIONS)}, but {found} is installed, whose internals may "
        f"differ; run: pip install sglang=={SGLANG_VERSIONS[-1]}"
    )
    if any(arg.startswith("--kv-backend") for arg in sys.argv):
        # SGLang logs a plug-in's exception and goes on without it; whoever asked for us must not get that.
        print(f"error: {sentence}", file=sys.stderr)
        raise SystemExit(2)
    raise UnsupportedSGLang(sentence)


def register() -> None:
    """Add the options. Called once in each process, by the entry point of the plug-in."""
    check_version()

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices

    from sglang_kvc.args import KvcServerArgs

    if BACKEND not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([BACKEND])
    HookRegistry.register(SERVER_ARGS, KvcServerArgs, HookType.REPLACE)
    if ENGINE_MODULE in sys.modules:
        # Already imported, so its class attribute holds the stock class; a later import would pick up ours.
        HookRegistry.register(f"{ENGINE_MODULE}.Engine.server_args_class", KvcServerArgs, HookType.REPLACE)
