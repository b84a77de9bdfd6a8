"""What a model computes K and V from: its config, weights and adapters, for the identity of stored blocks."""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import sglang
import torch
import torch.distributed as dist
from sglang.srt.runtime_context import get_parallel

from ..cache.identity import canonical

# Fields of a config that name its file, its library or the dtype, which counts as SGLang resolved it.
UNRELATED = ("_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "torch_dtype", "dtype")
# Server arguments that change the arithmetic of layers, or add weights that are no parameters.
OPTIONS = (
    "model_impl", "quantization", "modelopt_quant", "quantize_and_serve", "rl_quant_profile", "forward_hooks",
    "enable_multimodal", "enable_precise_embedding_interpolation", "enable_tf32_matmul", "enable_quant_communications",
    "fp8_gemm_runner_backend", "fp4_gemm_runner_backend", "moe_runner_backend", "moe_a2a_backend",
    "flashinfer_mxfp4_moe_precision", "flashinfer_a2a_dispatch_type", "deepep_dispatcher_output_dtype",
    "enable_w4a4_mxfp4_megamoe", "kt_weight_path", "kt_method", "kt_num_gpu_experts",
    "kt_max_deferred_experts_per_token", "lora_target_modules", "experts_shared_outer_loras",
)  # fmt: skip
ROW = 4096  # 4-byte words per sum
PIECE = 2048  # rows summed at a time
CHUNK = 1 << 20  # bytes per CRC


def model_text(runner: Any, start_layer: int) -> str:
    """Everything besides weights that the K and V of a rank depend on, as text. `runner`: SGLang's ModelRunner;
    `start_layer`: the first layer of the rank."""
    config, model, parallel = runner.model_config, type(runner.model), get_parallel()
    parts = {
        "sglang": sglang.__version__,
        "class": f"{model.__module__}.{model.__qualname__}",
        "config": config_fields(config.hf_config),
        "text_config": config_fields(config.hf_text_config),
        "dtype": config.dtype,
        "quantization": config.quantization,
        "options": {name: getattr(runner.server_args, name, None) for name in OPTIONS},
        "place": (parallel.attn_tp_size, parallel.attn_tp_rank, start_layer),
    }
    return canonical(parts)


def config_fields(config: Any) -> dict[str, Any]:
    """The fields of a config of transformers, as SGLang resolved it, that equal servers have in common."""
    own = {name: value for name, value in config.to_dict().items() if name not in UNRELATED}
    text = own.get("text_config")
    if isinstance(text, dict):
        own["text_config"] = {name: value for name, value in text.items() if name not in UNRELATED}
    return own


def weights_of_ranks(model: torch.nn.Module) -> bytes:
    """A digest of the weights of all tensor-parallel ranks, because the K and V of a rank depend on all of them. All
    ranks call it at the same time."""
    group, own = get_parallel().tp_group, weights_digest(model)
    if group.world_size == 1:
        return own
    digests = [b""] * group.world_size
    dist.all_gather_object(digests, own, group=group.cpu_group)
    return hashlib.blake2b(b"".join(digests), digest_size=16).digest()


def weights_digest(model: torch.nn.Module) -> bytes:
    """A digest of all bytes of the parameters and persistent buffers."""
    return _digest(_weights(model))


def adapter_digest(adapter: Any) -> str:
    """A digest of a LoRA adapter as SGLang loaded it (`LoRAAdapter`), in hex. Kept with the adapter."""
    known = getattr(adapter, "kvc_digest", None)
    if known is None:
        tensors = {f"{i} {name}": x for i, layer in enumerate(adapter.layers) for name, x in layer.weights.items()}
        tensors |= adapter.embedding_layers | adapter.added_tokens_embeddings
        known = _digest(sorted(tensors.items()), canonical([adapter.config.hf_config, adapter.scaling])).hex()
        adapter.kvc_digest = known
    return known


def _weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}", buffer


def _digest(tensors: Iterable[tuple[str, torch.Tensor]], text: str = "") -> bytes:
    digest = hashlib.blake2b(text.encode(), digest_size=16)
    for name, x in tensors:
        x = x.detach()
        # A transposed weight lies contiguous in another order of its dims.
        order = sorted(range(x.dim()), key=lambda dim: -x.stride(dim))
        digest.update(canonical([name, x.dtype, x.shape, order]).encode())
        if x.numel():
            digest.update(_checksums(x.permute(order).contiguous().view(-1).view(torch.uint8)))
    return digest.digest()


def _checksums(data: torch.Tensor) -> bytes:
    """Checksums of `data`, uint8 `[n]`, at the speed of its memory. Any changed byte changes them."""
    return _crcs(data) if data.device.type == "cpu" else _sums(data)


def _crcs(data: torch.Tensor) -> bytes:
    view = memoryview(data.numpy())
    return b"".join(struct.pack("<I", zlib.crc32(view[at : at + CHUNK])) for at in range(0, len(view), CHUNK))


def _sums(data: torch.Tensor) -> bytes:
    """Sums over rows and over columns of words, and the bytes after the last whole row. A sum copies its input to
    int64, so only a piece is summed at a time."""
    end = len(data) // (4 * ROW) * (4 * ROW)
    words = (data[:end] if data.storage_offset() % 4 == 0 else data[:end].clone()).view(torch.int32).view(-1, ROW)
    rows, columns = [], torch.zeros(ROW, dtype=torch.int64, device=data.device)
    for piece in words.split(PIECE):
        rows.append(piece.sum(1))
        columns += piece.sum(0)
    return torch.cat((*rows, columns)).cpu().numpy().tobytes() + data[end:].cpu().numpy().tobytes()
