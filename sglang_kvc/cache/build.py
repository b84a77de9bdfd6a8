"""Construction of a `Runtime`: the policy and the layout from the settings, then every table from a number of bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvc_kernels.store import PageStore

from ..policies import make_policy
from .blocks import Blocks
from .ledger import Ledger
from .runtime import Runtime
from .sizing import make_layout, size_server

if TYPE_CHECKING:
    from ..options.config import KvcConfig


def build_runtime(
    config: KvcConfig,
    *,
    num_bytes: int,
    layers: int,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Runtime:
    """The runtime of a server whose page store and tables take `num_bytes`, with `heads` KV heads per rank. ValueError
    (one sentence) if `num_bytes` is too small or the policy does not fit the model."""
    policy = make_policy(config)
    layout = make_layout(config, policy, layers=layers, heads=heads, head_dim=head_dim)
    policy.check(layout)
    block_formats = policy.block_formats(layout)
    sizing = size_server(num_bytes, config, policy, layout, block_formats, dtype.itemsize)
    store = PageStore.create(
        layout,
        block_formats,
        num_pages=sizing.num_pages,
        num_blocks=sizing.num_blocks,
        dtype=dtype,
        device=device,
    )
    ledger = Ledger(sizing.num_blocks, sizing.chargeable_pages)
    return Runtime(config, policy, layout, sizing, store, ledger, Blocks(sizing.num_blocks))
