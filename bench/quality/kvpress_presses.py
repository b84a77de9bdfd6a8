"""Presses of NVIDIA's kvpress, applied to the entire context or block by block.

kvpress needs an older transformers than SGLang, so this module runs in a separate environment. kvpress imports
`datasets` and `fire` for presses that do not run here. If they are not installed, stand-ins that fail when called
replace them during the import; `STAND_INS` lists them.
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
    """Stand-in for a module. Everything imported from it fails when called."""

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
        for name in names:  # later imports must not find the stand-ins
            del sys.modules[name]
    STAND_INS.extend(names)
    return kvpress


kvpress = _import_kvpress()


class Blocks(kvpress.BasePress):
    """A press applied to each full block separately. Every block keeps the same share, independent of later tokens.

    The score of a block depends on the hidden states and positions of all tokens up to its end, but only on its own
    keys and values. The kept tokens are therefore equal for all sequences with this prefix, as in a shared cache. As on
    the server, all tokens after the last full block are kept, so compare by the kept share. With blocks of 128 tokens,
    PyramidKV falls back to SnapKV.

    kvpress has two wrappers of this kind. `ChunkPress` (scope `chunk`) scores a block from its own hidden states, as if
    the sequence began there. It only supports score presses and fails on short ends. It agrees with this class if
    scores depend on keys alone. `BlockPress` has one budget for the sequence and evicts from earlier blocks when later
    ones arrive. A shared block must not depend on later tokens, so `BlockPress` does not run here.
    """

    def __init__(self, press, size: int):
        self.press, self.size = press, size

    def post_init_from_model(self, model):
        self.press.post_init_from_model(model)

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        full_tokens = keys.shape[2] // self.size * self.size
        cos, sin = kwargs["position_embeddings"]
        out, masked = [], []
        for begin in range(0, full_tokens, self.size):
            end = begin + self.size
            block = slice(begin, end)
            module.masked_key_indices = None
            out.append(
                self.press.compress(
                    module,
                    hidden_states[:, :end],
                    keys[:, :, block],
                    values[:, :, block],
                    None if attentions is None else attentions[:, :, block, block],
                    {**kwargs, "position_embeddings": (cos[:, :end], sin[:, :end])},
                )
            )
            if module.masked_key_indices is not None:
                batch, head, token = module.masked_key_indices
                masked.append((batch, head, token + begin))
        out.append((keys[:, :, full_tokens:], values[:, :, full_tokens:]))
        # AdaKV drops no keys. kvpress masks these keys in the attention of the questions.
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
    "snapkv-w8": lambda ratio: kvpress.SnapKVPress(ratio, window_size=8),  # our window for one-shot prompts
    "ada-snapkv": lambda ratio: kvpress.AdaKVPress(kvpress.SnapKVPress(ratio)),
    "ada-snapkv-w8": lambda ratio: kvpress.AdaKVPress(kvpress.SnapKVPress(ratio, window_size=8)),
    "critical-ada-snapkv": lambda ratio: kvpress.CriticalAdaKVPress(kvpress.SnapKVPress(ratio)),
    "h2o": kvpress.ObservedAttentionPress,
    "pyramidkv": kvpress.PyramidKVPress,
    "streaming-llm": kvpress.StreamingLLMPress,
    "random": kvpress.RandomPress,
    "knorm": kvpress.KnormPress,
}
EAGER = ("h2o",)  # presses that need attention weights, which only the eager implementation returns


def build(name: str, keep: float, scope: str, block: int):
    """Press `name` that keeps the share `keep`; None for the full cache."""
    if name == "full":
        return None
    press = PRESSES[name](1 - keep)
    if scope == "block":
        return Blocks(press, block)
    return kvpress.ChunkPress(press, block) if scope == "chunk" else press
