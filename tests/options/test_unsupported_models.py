"""Every unsupported model is refused with one sentence, from its config file or when it is built."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_kvc.errors import ConfigError
from sglang_kvc.options.config import KvcConfig
from sglang_kvc.options.unsupported_models import MODEL_REFUSALS, ModelFacts, check_facts, check_model

from .conftest import configurator, one_sentence

TRAITS = {
    "mla": {"mla": True},
    "sparse_attention": {"sparse_attention": True},
    "hybrid_swa": {"hybrid_swa": True},
    "shared_kv": {"shared_kv": True},
    "uneven_layers": {"uneven_layers": True},
    "hidden_layers": {"hidden_layers": True},
    "hybrid_state": {"hybrid_state": True},
    "encoder_decoder": {"encoder_decoder": True},
    "encoder_only": {"encoder_only": True},
    "local_attention": {"local_attention": True},
    "dual_chunk": {"dual_chunk": True},
    "scaled_by_position": {"scaled_by_position": True},
    "other_softmax": {"other_softmax": True},
    "v_head_dim": {"v_head_dim": 64},
    "head_dim": {"head_dim": 80, "v_head_dim": 80},
    "dtype": {"dtype": "float32"},
}


def test_every_model_trait_has_case():
    assert set(TRAITS) == {r.name for r in MODEL_REFUSALS}
    check_facts(ModelFacts("LlamaForCausalLM"), KvcConfig())


@pytest.mark.parametrize("name", sorted(TRAITS))
def test_unsupported_models_are_rejected(name):
    with pytest.raises(ConfigError) as e:
        check_facts(ModelFacts("SomeModel", **TRAITS[name]), KvcConfig())
    assert "SomeModel" in one_sentence(str(e.value))


MODELS = {
    "latent": dict(
        architectures=["DeepseekV2ForCausalLM"],
        model_type="deepseek_v2",
        kv_lora_rank=64,
        q_lora_rank=None,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
    ),
    "two_pools": dict(architectures=["MellumForCausalLM"], is_hybrid_swa=True, swa_attention_layer_ids=[0]),
    "shared_kv": dict(architectures=["Gemma3nForCausalLM"], model_type="gemma3n_text", num_kv_shared_layers=1),
    "odd_head": dict(hidden_size=320, head_dim=80),
    "encoder": dict(architectures=["BertModel"], model_type="bert"),
}
WORDS = {
    "latent": "latent attention",
    "two_pools": "sliding-window",
    "shared_kv": "share keys",
    "odd_head": "head size",
    "encoder": "encoder",
}


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_models_are_rejected_from_config_file(parse, make_model, capsys, kind):
    with pytest.raises(SystemExit) as e:
        parse("--kv-backend", "kvc", model_path=make_model(**MODELS[kind]))
    assert e.value.code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert WORDS[kind] in one_sentence(last)


def test_float32_is_rejected_from_flag(parse, capsys):
    with pytest.raises(SystemExit):
        parse("--kv-backend", "kvc", "--dtype", "float32")
    assert "--dtype float32" in one_sentence(capsys.readouterr().err.strip().splitlines()[-1])


def test_built_model_is_checked_again(parse):
    check_model(configurator(parse))
    for changes in (
        {"use_mla_backend": True},
        {"is_hybrid_swa": True},
        {"mambaish_config": object()},
        {"model_dtype": "torch.float32"},
        {"layer": {"is_cross_attention": True}},
        {"layer": {"attn_type": "encoder_only"}},
        {"layer": {"tp_k_head_num": 4}},
        {"layer": {"xai_temperature_len": 1024}},
        {"layer": {"logit_cap": 30.0, "logit_capping_method": "sigmoid"}},
        {"layer": {"sinks": object()}},
    ):
        with pytest.raises(ConfigError) as e:
            check_model(configurator(parse, **changes))
        one_sentence(str(e.value))


def test_layers_of_transformers_backend_are_checked(parse):
    """SGLang's Transformers backend keeps its layers in a dict."""
    from sglang_kvc.options.model_facts import attention_layers

    config = configurator(parse, layer={"sliding_window_size": 63})
    backend = SimpleNamespace(attention_instances=dict(enumerate(config.model.modules())))
    model = SimpleNamespace(modules=lambda: [backend, SimpleNamespace(attention_instances=None)])
    assert attention_layers(model) == list(backend.attention_instances.values())
    check_model(configurator(parse, model=model))
    with pytest.raises(ConfigError, match="--kvc-policy quota"):
        check_model(configurator(parse, "--kvc-policy", "quota", model=model))
    with pytest.raises(ConfigError) as e:
        check_model(configurator(parse, model=SimpleNamespace(modules=lambda: [])))
    assert "not known" in one_sentence(str(e.value))


SLIDING = dict(architectures=["Gemma2ForCausalLM"], model_type="gemma2", sliding_window=1024)


@pytest.mark.parametrize("policy", ["leankv", "quota"])
def test_windowed_models_need_blocks_that_keep_every_token(parse, make_model, capsys, policy):
    """Windows are found in the config file if it declares them, otherwise in the built model."""
    parse("--kv-backend", "kvc", model_path=make_model(**SLIDING))
    with pytest.raises(SystemExit):
        parse("--kv-backend", "kvc", "--kvc-policy", policy, model_path=make_model(**SLIDING))
    assert "sliding-window" in one_sentence(capsys.readouterr().err.strip().splitlines()[-1])
    windowed = {"layer": {"sliding_window_size": 63}}
    check_model(configurator(parse, **windowed))
    with pytest.raises(ConfigError, match=f"--kvc-policy {policy}") as e:
        check_model(configurator(parse, "--kvc-policy", policy, **windowed))
    one_sentence(str(e.value))
