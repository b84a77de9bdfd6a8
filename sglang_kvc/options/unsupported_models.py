"""Models that cannot be served with the compressed cache, as a table of refusals like that of `unsupported_args`."""

from __future__ import annotations

import logging
from typing import Any

import torch

from sglang_kvc.errors import ConfigError
from sglang_kvc.options.calibration_file import check_identity
from sglang_kvc.options.config import KvcConfig
from sglang_kvc.options.model_facts import ModelFacts, from_configurator
from sglang_kvc.options.resolve import resolve_config
from sglang_kvc.options.unsupported_args import Refusal, check_capability
from sglang_kvc.options.validate import check_geometry, check_one_shot
from sglang_kvc.policies import make_policy

logger = logging.getLogger(__name__)

SUPPORTED_HEAD_DIMS = (32, 64, 128, 256)

_MODEL = "serve it with --kv-backend default"

MODEL_REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "mla",
        lambda m: m.mla,
        "The model {} with latent attention (MLA)",
        "its cache rows are not keys and values",
        _MODEL,
    ),
    Refusal(
        "sparse_attention",
        lambda m: m.sparse_attention,
        "The model {} with sparse attention",
        "it keeps its own index next to the cache",
        _MODEL,
    ),
    Refusal(
        "hybrid_swa",
        lambda m: m.hybrid_swa,
        "The model {}, whose sliding-window layers have their own pool,",
        "the cache is one pool for all layers",
        _MODEL,
    ),
    Refusal(
        "shared_kv",
        lambda m: m.shared_kv,
        "The model {}, whose layers share keys and values,",
        "every layer has its own pages",
        _MODEL,
    ),
    Refusal(
        "uneven_layers",
        lambda m: m.uneven_layers,
        "The model {} with layers that differ in number or size of KV heads",
        "all layers have the same page layout",
        _MODEL,
    ),
    Refusal(
        "hidden_layers",
        lambda m: m.hidden_layers,
        "The model {}",
        "its attention layers were not found, so their windows and masks are not known",
        _MODEL,
    ),
    Refusal(
        "hybrid_state",
        lambda m: m.hybrid_state,
        "The model {} with state-space or linear-attention layers",
        "their state is not a KV cache",
        _MODEL,
    ),
    Refusal(
        "encoder_decoder",
        lambda m: m.encoder_decoder,
        "The encoder-decoder model {}",
        "its cross attention is not causal",
        _MODEL,
    ),
    Refusal(
        "encoder_only",
        lambda m: m.encoder_only,
        "The encoder model {}",
        "it attends in both directions and keeps no KV cache",
        _MODEL,
    ),
    Refusal(
        "local_attention",
        lambda m: m.local_attention,
        "The model {} with chunked local attention",
        "its layers read different parts of the sequence",
        _MODEL,
    ),
    Refusal(
        "dual_chunk",
        lambda m: m.dual_chunk,
        "The model {} with dual-chunk attention",
        "each of its layers needs three kinds of queries",
        _MODEL,
    ),
    Refusal(
        "scaled_by_position",
        lambda m: m.scaled_by_position,
        "The model {} with logits that are scaled by position",
        "the kernels have one scale per layer",
        _MODEL,
    ),
    Refusal(
        "other_softmax",
        lambda m: m.other_softmax,
        "The model {} with attention sinks, or with logits that are capped by another function than tanh",
        "the kernels compute neither",
        _MODEL,
    ),
    Refusal(
        "v_head_dim",
        lambda m: m.v_head_dim != m.head_dim,
        "The model {} with keys and values of different head sizes",
        "a page holds both at one size",
        _MODEL,
    ),
    Refusal(
        "head_dim",
        lambda m: m.head_dim not in SUPPORTED_HEAD_DIMS,
        "The model {} with this head size",
        f"the kernels support {', '.join(map(str, SUPPORTED_HEAD_DIMS))}",
        _MODEL,
    ),
    Refusal(
        "dtype",
        lambda m: m.dtype not in ("bfloat16", "float16"),
        "The model {} in a dtype other than bfloat16 or float16",
        "pages hold 16-bit values",
        "add --dtype bfloat16",
    ),
)


def check_facts(facts: ModelFacts, config: KvcConfig) -> None:
    """Raise at the first trait of the model that cannot be served, and for a calibration file or a page size that does
    not fit the model."""
    for refusal in MODEL_REFUSALS:
        if refusal.when(facts):
            raise refusal.error(facts.name)
    if facts.windows and not make_policy(config).keeps_all:
        raise ConfigError(
            f"The model {facts.name} with sliding-window layers cannot be served with --kvc-policy {config.policy}, "
            f"because a window counts positions, which pruned blocks lose; use --kvc-policy quantize."
        )
    check_identity(config, facts.identity)
    check_geometry(config, head_dim=facts.head_dim)
    check_one_shot(config, head_dim=facts.head_dim, windowed=bool(facts.windows))


def check_model(configurator: Any) -> None:
    """The check of the built model, before any pool exists: `configurator` is SGLang's KVCacheConfigurator."""
    if torch.device(configurator.device).type == "cuda":
        check_capability(torch.cuda.get_device_capability())
    facts = from_configurator(configurator)
    check_facts(facts, resolve_config(configurator.server_args))
    if facts.kv_scales:
        logger.warning(
            "The KV-cache scales of the checkpoint %s are ignored: --kv-backend kvc computes scales from the data of "
            "each block.", facts.name,
        )  # fmt: skip
