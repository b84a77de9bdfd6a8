"""`ModelFacts` from SGLang's objects: first from the model's config, later from the built model.

Written against SGLang 0.5.23: `ModelConfig` (configs/model_config.py) and `KVCacheConfigurator`
(mem_cache/kv_cache_configurator.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sglang_kvc.calibration.model_fingerprint import Identity, identity_of

# Architectures that attend in both directions or keep no KV cache. SGLang's ModelConfig has no flag for them.
ENCODER_ARCHITECTURES = (
    "BertModel",
    "BertForSequenceClassification",
    "CLIPModel",
    "Contriever",
    "Lfm2BidirectionalModel",
    "RobertaModel",
    "XLMRobertaModel",
    "XLMRobertaForSequenceClassification",
)


@dataclass(frozen=True)
class ModelFacts:
    """Traits that decide whether a model can be served, in builtins."""

    name: str
    mla: bool = False
    hybrid_swa: bool = False
    windows: bool = False  # sliding-window layers in the one pool that all layers share
    shared_kv: bool = False
    uneven_layers: bool = False
    hidden_layers: bool = False  # the built model's attention layers were not found
    hybrid_state: bool = False
    encoder_decoder: bool = False
    encoder_only: bool = False
    local_attention: bool = False
    sparse_attention: bool = False
    dual_chunk: bool = False
    scaled_by_position: bool = False
    other_softmax: bool = False
    head_dim: int = 128
    v_head_dim: int = 128
    dtype: str = "bfloat16"
    kv_scales: bool = False  # of the built model; ignored with a warning, not refused
    identity: Identity | None = None


def from_model_config(mc: Any) -> ModelFacts:
    """Facts that the model's config file shows, before any weight is read."""
    # Late: only servers need SGLang, and the scheduler state must be importable without it.
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import (
        AttentionArch,
        is_deepseek_dsa,
        is_deepseek_v4,
        is_hybrid_swa_model,
        is_minimax_sparse,
    )

    hf = mc.hf_config
    architectures = tuple(getattr(hf, "architectures", None) or ("unknown",))
    return ModelFacts(
        name=architectures[0],
        mla=mc.attention_arch == AttentionArch.MLA,
        # This holds even if an option puts all layers into one pool, because these layers differ in more than a window.
        hybrid_swa=bool(mc.is_hybrid_swa) or is_hybrid_swa_model(list(architectures), mc.hf_text_config),
        windows="sliding_attention" in (getattr(mc.hf_text_config, "layer_types", None) or ()),
        # A looped model runs its layers again over the keys and values of the first pass.
        shared_kv=bool(getattr(mc.hf_text_config, "num_kv_shared_layers", 0)) or (getattr(hf, "loop_num", 1) or 1) > 1,
        hybrid_state=mambaish_config(mc) is not None,
        encoder_decoder=bool(mc.is_encoder_decoder),
        encoder_only=bool(set(architectures) & set(ENCODER_ARCHITECTURES)) or bool(mc.is_embedding_gemma),
        local_attention=bool(mc.is_local_attention_model),
        sparse_attention=is_deepseek_dsa(hf) or is_deepseek_v4(hf) or is_minimax_sparse(hf),
        dual_chunk=getattr(hf, "dual_chunk_attention_config", None) is not None,
        head_dim=int(mc.head_dim),
        v_head_dim=int(mc.v_head_dim),
        dtype=str(mc.dtype).removeprefix("torch."),
        identity=identity_of(hf),
    )


def attention_layers(model: Any) -> list[Any]:
    """All `RadixAttention` of a built model. SGLang's Transformers backend keeps them in a plain dict, which
    `modules()` does not visit."""
    layers: dict[int, Any] = {}
    for module in model.modules():
        instances = getattr(module, "attention_instances", None) or {}
        layers |= {id(m): m for m in (module, *instances.values()) if type(m).__name__ == "RadixAttention"}
    return list(layers.values())


def from_configurator(configurator: Any) -> ModelFacts:
    """Facts of the config file, corrected by the built model, whose layers know their windows and masks."""
    facts = from_model_config(configurator.model_config)
    layers = attention_layers(configurator.model)
    masks = {getattr(m.attn_type, "value", m.attn_type) for m in layers}
    return replace(
        facts,
        identity=None,  # compared when the arguments are checked: building a model may complete its config
        mla=facts.mla or bool(configurator.use_mla_backend),
        hybrid_swa=facts.hybrid_swa or bool(configurator.is_hybrid_swa),
        hidden_layers=not layers,
        windows=facts.windows or any(m.sliding_window_size >= 0 for m in layers),
        uneven_layers=len({(m.tp_k_head_num, m.tp_q_head_num, m.qk_head_dim, m.v_head_dim) for m in layers}) > 1,
        scaled_by_position=any(m.xai_temperature_len > 0 for m in layers),
        other_softmax=_has_other_softmax(configurator.model, layers),
        hybrid_state=facts.hybrid_state or configurator.mambaish_config is not None,
        encoder_decoder=facts.encoder_decoder or any(m.is_cross_attention for m in layers),
        encoder_only=facts.encoder_only or bool(masks - {"decoder"}),
        dtype=str(configurator.model_dtype).removeprefix("torch."),
        kv_scales=_has_kv_scales(configurator.model, layers),
    )


def _has_other_softmax(model: Any, layers: list[Any]) -> bool:
    """Whether the model has attention sinks, or caps logits by another function than tanh."""
    sinks = any(getattr(module, "sinks", None) is not None for module in model.modules())
    return sinks or any(m.logit_cap and m.logit_capping_method != "tanh" for m in layers)


def _has_kv_scales(model: Any, layers: list[Any]) -> bool:
    """Whether the checkpoint has scales for a quantized KV cache, or declares them in a config file."""
    declared = getattr(getattr(model, "quant_config", None), "kv_cache_quant_algo", None)
    # SGLang's weight quantization gives every layer a scale of 1.
    return bool(declared) or any(getattr(m, "k_scale_float", None) not in (None, 1.0) for m in layers)
