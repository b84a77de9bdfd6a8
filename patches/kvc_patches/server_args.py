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
    """Refuse an SGLang whose inside is not known, rather than patch it half.

    SGLang logs a plug-in's exception and goes on without it. Whoever asked for this one must not get that: a command
    line ends here, and an `Engine` gets the same sentence instead of `unexpected keyword argument`.
    """
    from importlib.metadata import version

    from sglang_kvc.options.command_line import names_backend

    found = version("sglang")
    if found in SGLANG_VERSIONS:
        return
    sentence = (
        f"sglang-kvc works with SGLang {', '.join(SGLANG_VERSIONS)}, but {found} is installed, whose internals may "
        f"differ; run: pip install sglang=={SGLANG_VERSIONS[-1]}"
    )
    if names_backend():
        print(f"error: {sentence}", file=sys.stderr)
        raise SystemExit(2)
    _refuse_keyword(sentence)
    raise UnsupportedSGLang(sentence)


def _refuse_keyword(sentence: str) -> None:
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    except ImportError:  # the caller's sentence matters more than where it is said
        return

    def around_init(orig, self, *args, **kwargs):
        if "kv_backend" in kwargs:
            raise UnsupportedSGLang(sentence)
        return orig(self, *args, **kwargs)

    HookRegistry.register(f"{SERVER_ARGS}.__init__", around_init, HookType.AROUND)


def register() -> None:
    """Add the options. Called once in each process, by the entry point of the plug-in."""
    check_version()

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices

    from sglang_kvc.options.server_args import KvcServerArgs

    if BACKEND not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([BACKEND])
    HookRegistry.register(SERVER_ARGS, KvcServerArgs, HookType.REPLACE)
    if ENGINE_MODULE in sys.modules:
        # Already imported, so its class attribute holds the stock class; a later import would pick up ours.
        HookRegistry.register(f"{ENGINE_MODULE}.Engine.server_args_class", KvcServerArgs, HookType.REPLACE)
