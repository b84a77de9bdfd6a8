"""Host time of a forward: the plan, and the launches of all layers, without running kernels.

`python -m bench.kernels.host_time [OUT]`; needs no GPU. There are two forwards of a model with 32 layers: a warm prompt
of 5 new tokens after 4096 cached ones, and a decode step of 64 requests. The figure is the scheduler thread's CPU time
in the Python code of this project and of torch, without CUDA launches and FlashInfer.
"""

from __future__ import annotations

import statistics
import sys
import time
from types import SimpleNamespace
from unittest import mock

import torch
from triton.runtime.jit import JITFunction

from bench.kernels.common import RESULTS, Results
from kvc_kernels.store import PageStore
from sglang_kvc.adapter.attention_backend import KvcAttnBackend
from sglang_kvc.cache.build import build_runtime
from sglang_kvc.engine.attention import Attention
from sglang_kvc.options.config import KvcConfig

LAYERS, QUERY_HEADS, HEADS, DIM, P = 32, 32, 8, 128, 128
CACHED, NEW, STEP = 4096, 5, 64
REPEATS = 60


def make_backend(**options) -> KvcAttnBackend:
    """Backend of a server with a small pool on the CPU, which it treats as a GPU."""
    runtime = build_runtime(
        KvcConfig(block_size=P, **options), num_bytes=256 << 20, layers=LAYERS, heads=HEADS, head_dim=DIM,
        dtype=torch.bfloat16, device="cpu",
    )  # fmt: skip
    policy = runtime.policy
    backend = object.__new__(KvcAttnBackend)
    backend.runtime, backend.block_tokens, backend._layer = runtime, P, backend._run
    backend.token_to_kv_pool = SimpleNamespace(start_layer=0)
    slots = torch.arange(2 * CACHED, dtype=torch.int32).repeat(STEP + 1, 1)
    backend.req_to_token_pool = SimpleNamespace(req_to_token=slots)
    backend.attention = Attention(
        runtime.store, policy.score_sampling, policy.fake_quant_format(policy.format_id_of(None)),
        query_heads=QUERY_HEADS,
        max_batch=STEP, max_blocks=2 * CACHED // P,
    )  # fmt: skip
    return backend


def batch(requests: int, length: int, new: int) -> SimpleNamespace:
    """SGLang's forward batch of `requests` requests of `length` tokens. `new`: new tokens per request; 0: decoding."""
    tokens = requests * max(1, new)
    mode = SimpleNamespace(is_idle=lambda: False, is_decode=lambda: new == 0)
    lens = torch.full((requests,), length)
    return SimpleNamespace(
        forward_mode=mode, req_pool_indices=1 + torch.arange(requests), seq_lens=lens, seq_lens_cpu=lens,
        extend_seq_lens=torch.full((requests,), new, dtype=torch.int32), extend_seq_lens_cpu=[new] * requests,
        out_cache_loc=torch.arange(tokens), rids=[str(i) for i in range(requests)], tokens=tokens,
    )  # fmt: skip


def measure(backend: KvcAttnBackend, fb: SimpleNamespace) -> dict[str, float]:
    """Median CPU milliseconds of the plan and of all layers."""
    layers = [
        SimpleNamespace(
            layer_id=i, tp_q_head_num=QUERY_HEADS, tp_k_head_num=HEADS, qk_head_dim=DIM, v_head_dim=DIM,
            scaling=DIM**-0.5, logit_cap=0.0, sliding_window_size=-1,
        )
        for i in range(LAYERS)
    ]  # fmt: skip
    q, k, v = (torch.zeros((fb.tokens, h * DIM), dtype=torch.bfloat16) for h in (QUERY_HEADS, HEADS, HEADS))
    forward = backend.forward_decode if fb.forward_mode.is_decode() else backend.forward_extend
    times = []
    for _ in range(REPEATS):
        start = time.thread_time_ns()
        backend.init_forward_metadata_out_graph(fb)
        planned = time.thread_time_ns()
        for layer in layers:
            forward(q, k, v, layer, fb)
        times.append((planned - start, time.thread_time_ns() - planned))
    plan, run = (statistics.median(x) / 1e6 for x in zip(*times))
    return {"plan_ms": round(plan, 3), "layers_ms": round(run, 3)}


def main() -> None:
    results = Results(sys.argv[1] if len(sys.argv) > 1 else RESULTS / "host_time.json", layers=LAYERS)
    torch.set_num_threads(1)
    no_launch = mock.patch.object(JITFunction, "run", lambda *args, **options: None)
    with no_launch, mock.patch.object(PageStore, "use_kernels", True):
        for name, options in {
            "k4v4": dict(high="k4v4"),
            "leankv": dict(policy="leankv", high="k8v4", low="k4v2", alpha_high=1.0, alpha_low=0.05),
        }.items():
            backend = make_backend(**options)
            for forward, fb in {"warm": batch(1, CACHED + NEW, NEW), "decode": batch(STEP, CACHED, 0)}.items():
                row = {"cache": name, "forward": forward, **measure(backend, fb)}
                results.add(row)
                results.score({f"host_{name}_{forward}": (row["plan_ms"] + row["layers_ms"], "ms")})
    results.show()


if __name__ == "__main__":
    main()
