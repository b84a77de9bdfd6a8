"""Fixtures of the option tests: a model folder with only a config file, and SGLang with our options active."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from types import SimpleNamespace

import pytest

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "vocab_size": 1000,
    "torch_dtype": "bfloat16",
    "rope_theta": 10000.0,
}


def one_sentence(text: str) -> str:
    """Assert that `text` is one clear sentence: one line, capital or flag first, a full stop last, no traceback."""
    assert "\n" not in text.strip(), text
    assert text.strip().endswith("."), text
    assert not re.search(r"\. [A-Z]", text), f"more than one sentence: {text}"
    assert "Traceback" not in text
    return text


def configurator(parse, *options, **changes):
    """A stand-in for SGLang's KVCacheConfigurator, for a model whose second layer has the attributes in `layer`."""
    from sglang.srt.arg_groups.model_override_base import model_config_of

    args = parse("--kv-backend", "kvc", *options)
    layer = dict(
        attn_type="decoder", is_cross_attention=False, sliding_window_size=-1, xai_temperature_len=-1,
        tp_q_head_num=8, tp_k_head_num=2, qk_head_dim=64, v_head_dim=64, logit_cap=0.0, logit_capping_method="tanh",
    )  # fmt: skip
    layers = [type("RadixAttention", (), x)() for x in (layer, {**layer, **changes.pop("layer", {})})]
    facts = dict(
        server_args=args,
        device="cpu",
        model_config=model_config_of(args),
        model=SimpleNamespace(modules=lambda: layers, quant_config=changes.pop("quant_config", None)),
        model_dtype="torch.bfloat16",
        use_mla_backend=False,
        is_hybrid_swa=False,
        mambaish_config=None,
    )
    return SimpleNamespace(**{**facts, **changes})


@pytest.fixture(scope="session")
def make_model(tmp_path_factory):
    """`make_model(**changes)` -> a folder with the config of a small Llama, with the given changes."""

    def make(**changes) -> str:
        folder = tmp_path_factory.mktemp("model")
        (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
        return str(folder)

    return make


@pytest.fixture(scope="session")
def model(make_model) -> str:
    return make_model()


@pytest.fixture(scope="session")
def server_args():
    """The module `sglang.srt.server_args` with `KvcServerArgs` in place of `ServerArgs`."""
    import sglang.srt.server_args as module
    from sglang.srt.plugins.hook_registry import HookRegistry

    from kvc_patches import server_args as patch
    from sglang_kvc.options.server_args import KvcServerArgs

    if module.ServerArgs is not KvcServerArgs:
        with pytest.MonkeyPatch.context() as monkeypatch:  # other tests may have registered hooks that must not apply
            monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
            patch.register()
            HookRegistry.apply_hooks()
    assert module.ServerArgs is KvcServerArgs
    return module


@pytest.fixture
def parse(server_args, model):
    """Parse a command line and resolve the record, as `launch_server` does."""

    def parse(*argv, model_path=model):
        args = server_args.prepare_server_args(["--model-path", model_path, "--device", "cpu", *argv])
        args.resolve_once()
        return args

    return parse


def resolved(args):
    """SGLang's view of a record: the user's values, overridden by the resolved ones."""
    from sglang.srt.arg_groups.overrides import resolving_view

    return resolving_view(args)
