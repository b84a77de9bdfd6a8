"""`server_args` and `entrypoints.engine`: the options of the plug-in, and the check of SGLang's version.

`ServerArgs` is replaced without `registry.hook`, because a class has no parameters to record; `registry.verify` checks
that the replacement is in force. Relies on SGLang 0.5.23:
- `class ServerArgs` (a struct; `prepare_server_args(argv)` reads the module global of that name);
- `add_attention_backend_choices(choices)` appends to the list that argparse holds by reference;
- `Engine.server_args_class`, a class attribute that the replacement of the module global does not reach.
"""

from __future__ import annotations

import sys
from importlib import metadata

from .registry import SERVER_ARGS, SGLANG_VERSION

BACKEND = "kvc"
ENGINE_MODULE = "sglang.srt.entrypoints.engine"


class UnsupportedSGLang(RuntimeError):
    """The installed SGLang version is not the one that these hooks were written for."""


def check_version() -> None:
    """Refuse SGLang versions other than the supported one.

    SGLang logs a plug-in's exception and continues without the plug-in. A command line that asked for it ends here
    instead, and an `Engine` gets the same sentence instead of `unexpected keyword argument`.
    """
    from sglang_kvc.options.command_line import names_backend

    installed = metadata.version("sglang")
    if installed == SGLANG_VERSION:
        return
    sentence = (
        f"sglang-kvc works with SGLang {SGLANG_VERSION}, but {installed} is installed, whose internals may "
        f"differ; run: pip install sglang=={SGLANG_VERSION}"
    )
    if names_backend():
        print(f"error: {sentence}", file=sys.stderr)
        raise SystemExit(2)
    _refuse_keyword(sentence)
    raise UnsupportedSGLang(sentence)


def _refuse_keyword(sentence: str) -> None:
    """Let `Engine(kv_backend=...)`, which loads plug-ins before it makes its arguments, raise `sentence`."""
    engine = getattr(sys.modules.get(ENGINE_MODULE), "Engine", None)
    stock = getattr(engine, "server_args_class", None)
    if stock is None:  # the caller raises the sentence anyway
        return

    def server_args(*args, **kwargs):
        if "kv_backend" in kwargs:
            raise UnsupportedSGLang(sentence)
        return stock(*args, **kwargs)

    engine.server_args_class = staticmethod(server_args)


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
        # The imported module's class attribute holds the stock class; a later import takes the replacement.
        HookRegistry.register(f"{ENGINE_MODULE}.Engine.server_args_class", KvcServerArgs, HookType.REPLACE)
