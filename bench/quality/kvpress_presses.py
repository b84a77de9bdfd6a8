"""The compared presses of NVIDIA's kvpress, over the whole context or block by block.

kvpress needs an older transformers than SGLang, so this module runs in a separate environment. Importing kvpress also
imports `datasets` and `fire` for presses that are not run here. If they are not installed, stand-ins that fail when
used replace them during the import; `STAND_INS` names them.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch

STAND_INS: list[str] = []


class _StandIn(ModuleType):
    """A stand-in module; everything imported from it fails when called."""

    def __init__(self, name: str):
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)  # transformers asks for the spec of optional packages

    def __getattr__(self, attribute: str):
        if attribute.startswith("__"):
            raise AttributeError(attribute)

        def missing(*args, **kwargs):
            raise ImportError(f"{self.__name__}.{attribute} was called, but {self.__name__} is not installed")

        return missing


def _import_kvpress():
    names = [n for n in ("datasets", "fire") if importlib.util.find_spec(n) is None]
    sys.modules.update({n: _StandIn(n) for n in names})
    try:
        import kvpress
    finally:
        for name in names:  # nothing else may take them for the packages
            del sys.modules[name]
    STAND_INS.extend(names)
    return kvpress


kvpress = _import_kvpress()


class Blocks(kvpress.BasePress):
    """Any press, applied to each full block separately: every block keeps the same share, independent of later tokens.

    A block is scored with the information available at its end: hidden states and positions of all earlier tokens, but
    only its own keys and values. The kept tokens are therefore the same for every sequence with this prefix, as in a
    shared cache. Tokens after the last full block are all kept, as on the server, so compare by the kept share. Over
    blocks of 128 PyramidKV falls back to SnapKV.

    kvpress has two wrappers of its own. `ChunkPress` (scope `chunk`) scores a block from its own hidden states as if it
    began the sequence, takes score presses only, and fails on short ends; it agrees with this class where a score
    needs the keys alone. `BlockPress` evicts from earlier blocks as later ones come: one budget for the whole
    sequence, so that a block's content depends on what follows it. A shared block cannot do that; it is not run.
    """

    def __init__(self, press, size: int):
        self.press, self.size = press, size

    def post_init_from_model(self, model):
        self.press.post_init_from_model(model)

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        whole = keys.shape[2] // self.size * self.size
        cos, sin = kwargs["position_embeddings"]
        out, masked = [], []
        for begin in range(0, whole, self.size):
            end = begin + self.size
            own = slice(begin, end)
            module.masked_key_indices = None
            out.append(
                self.press.compress(
                    module,
                    hidden_states[:, :end],
                    keys[:, :, own],
                    values[:, :, own],
                    None if attentions is None else attentions[:, :, own, own],
                    {**kwargs, "position_embeddings": (cos[:, :end], sin[:, :end])},
                )
            )
            if module.masked_key_indices is not None:
                batch, head, token = module.masked_key_indices
                masked.append((batch, head, token + begin))
        out.append((keys[:, :, whole:], values[:, :, whole:]))
        # AdaKV drops nothing; kvpress hides these keys from the questions' attention.
        module.masked_key_indices = tuple(torch.cat(x) for x in zip(*masked)) if masked else None
        return tuple(torch.cat(x, dim=2) for x in zip(*out))


def _ada(ratio: float):
    return kvpress.AdaKVPress(kvpress.ExpectedAttentionPress(ratio, epsilon=1e-2))


PRESSES: dict[str, Callable[[float], kvpress.BasePress]] = {
    "ada-expected": _ada,
    "expected-eps": lambda ratio: kvpress.ExpectedAttentionPress(ratio, epsilon=1e-2),
    "expected": kvpress.ExpectedAttentionPress,
    "keydiff": kvpress.KeyDiffPress,
    "snapkv": kvpress.SnapKVPress,
    "snapkv-w8": lambda ratio: kvpress.SnapKVPress(ratio, window_size=8),  # the window of one-shot prompts here
    "ada-snapkv": lambda ratio: kvpress.AdaKVPress(kvpress.SnapKVPress(ratio)),
    "ada-snapkv-w8": lambda ratio: kvpress.AdaKVPress(kvpress.SnapKVPress(ratio, window_size=8)),
    "critical-ada-snapkv": lambda ratio: kvpress.CriticalAdaKVPress(kvpress.SnapKVPress(ratio)),
    "h2o": kvpress.ObservedAttentionPress,
    "pyramidkv": kvpress.PyramidKVPress,
    "streaming-llm": kvpress.StreamingLLMPress,
    "random": kvpress.RandomPress,
    "knorm": kvpress.KnormPress,
}
EAGER = ("h2o",)  # presses that read the prompt's attention, which only the eager implementation returns


def build(name: str, keep: float, scope: str, block: int):
    """The press of that name, or None for the full cache."""
    if name == "full":
        return None
    press = PRESSES[name](1 - keep)
    if scope == "block":
        return Blocks(press, block)
    return kvpress.ChunkPress(press, block) if scope == "chunk" else press
