"""Published methods as presets.

A method that only drops tokens is paired with k8v8, the packed format nearest to the one that it was published with.
The recent tokens that its paper keeps are the window, which stays uncompressed.
"""

from __future__ import annotations

from ..allocation import Ada, Pyramid, Uniform, Xkv
from ..allocation import Cake as CakeShare
from ..base import Policy
from ..presets import preset
from ..scorers.cake import Cake
from ..scorers.dapq import DapQ
from ..scorers.gate import Gate
from ..scorers.streaming_llm import StreamingLLM
from .compresskv import CompressKV
from .defensivekv import DefensiveKV
from .h2o import H2O
from .kv_compress import KvCompress
from .lazy_eviction import LazyEviction
from .snapkv import SnapKV

PUBLISHED: tuple[type[Policy], ...] = (
    preset(
        "kv-compress",
        "KV-Compress (arXiv 2410.00161): KVC-w with squared attention scores, ranked over all layers and heads.",
        high="k8v8",
        scorer=KvCompress(),
    ),
    preset("h2o", "H2O (arXiv 2306.14048): heavy hitters.", high="k8v8", scorer=H2O(), share=Uniform()),
    preset("snapkv", "SnapKV (arXiv 2404.14469).", high="k8v8", scorer=SnapKV(), share=Uniform()),
    preset(
        "streaming-llm",
        "StreamingLLM (arXiv 2309.17453), block by block.",
        high="k8v8",
        scorer=StreamingLLM(),
        share=Uniform(),
    ),
    preset(
        "pyramid",
        "PyramidKV (arXiv 2406.02069): SnapKV's scores, fewer pages in higher layers.",
        high="k8v8",
        scorer=SnapKV(),
        share=Pyramid(),
    ),
    preset(
        "minikv",
        "MiniKV (arXiv 2411.18077): a quarter of heavy hitters in a pyramid with beta = 7, a quarter of recent tokens, "
        "all at 2 bits. k2v2 quantizes a channel of keys over a whole block, not in MiniKV's groups of 16 tokens, and "
        "the recent tokens are those of every block.",
        window=128,
        high="k2v2",
        scorer=H2O(recent=0.25),
        share=Pyramid(beta=7.0, even=0.5),
    ),
    preset(
        "mikv",
        "MiKV (arXiv 2402.18096): heavy hitters at 4 bits, other tokens at 2; `keep` is the share of heavy hitters.",
        high="k4v4",
        low="k2v2",
        keep=0.25,
        scorer=H2O(),
        share=Uniform(),
    ),
    preset(
        "xkv",
        "XKV: each layer's share as measured; SnapKV's scores within a layer.",
        high="k8v8",
        scorer=SnapKV(),
        share=Xkv(),
    ),
    preset(
        "cake",
        "CAKE (arXiv 2503.12491): mean and variance of the attention of pseudo queries, layers by preference.",
        high="k8v8",
        scorer=Cake(),
        share=CakeShare(),
    ),
    preset(
        "defensivekv",
        "Layer-DefensiveKV (arXiv 2510.13334): the worst case over queries, ranked over all layers and heads.",
        high="k8v8",
        scorer=DefensiveKV(),
    ),
    preset(
        "lazy-eviction",
        "LazyEviction (arXiv 2506.15969): tokens that attention returns to; the answer's blocks compete in each layer.",
        high="k8v8",
        scorer=LazyEviction(),
        share=Ada(),
        lag=192,
    ),
    preset(
        "compresskv",
        "CompressKV (arXiv 2508.02401): the retrieval heads of a layer choose for all of its heads.",
        high="k8v8",
        scorer=CompressKV(),
        share=Uniform(),
    ),
    preset(
        "dapq",
        "DapQ: attention of pseudo queries at the positions after a block.",
        high="k8v8",
        scorer=DapQ(),
        share=Uniform(),
    ),
    preset("gate", "A trained gate of each head (Locret, arXiv 2410.01805).", high="k8v8", scorer=Gate()),
)
