"""`KvcServerArgs`: SGLang's server arguments plus `--kv-backend` and the `--kvc-*` options.

Server arguments are pickled into child processes, which unpickle them before any plugin is loaded. So importing this
module suffices for that, and changes nothing else. Written against SGLang 0.5.23: `ServerArgs.resolve_once(self)`,
`ServerArgs.from_cli_args(cls, args)`, `A`/`Arg`/`NS` of `arg_groups.arg_utils`. The record holds what the user said;
`resolving_view` reads what SGLang made of it.
"""

import logging
import sys
from typing import Any

import torch
from sglang.srt.arg_groups.arg_utils import NS, A, Arg
from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.arg_groups.overrides import declare_resolution, post_capture_kv_sizing_planned, resolving_view
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase
from sglang.srt.server_args import ServerArgs

from kvc_kernels.layout import FORMATS
from sglang_kvc.errors import ConfigError, listed
from sglang_kvc.options.command_line import CPU_PLATFORM
from sglang_kvc.options.model_facts import from_model_config
from sglang_kvc.options.resolve import resolve_config
from sglang_kvc.options.unsupported_args import (
    PREFILL_GRAPHS,
    check_args,
    check_chunk,
    check_dp_attention,
    check_memory,
    check_memory_saver,
    check_pool_sizing,
    environment_warnings,
    host_memory_of,
    ignored_warnings,
    trust_warning,
)
from sglang_kvc.options.unsupported_models import check_facts
from sglang_kvc.options.validate import check_pool, wasted_levels
from sglang_kvc.policies import POLICIES, SCORERS, SHARES

logger = logging.getLogger(__name__)

BACKENDS = ("default", "kvc")
MAX_RUNNING_REQUESTS = 256  # SGLang's default of 2048 or more sizes tables for requests that never come
MAX_RUNNING_REQUESTS_CPU = 32
# New tokens of the largest prefill CUDA graph. A graph saves host time, which larger prefills hide anyway, and pads to
# the next captured size: SGLang, which captures up to a whole chunk, computes 4101 tokens as 4608.
MAX_PREFILL_GRAPH = 2048
MEMORY_CPU = "1GB"  # SGLang's default takes most of the machine's memory


def _backend(text: str) -> str:
    """Refuse an unknown backend in one sentence (argparse would print every option of the server first)."""
    if text not in BACKENDS:
        _exit(f"--kv-backend {text!r} does not exist; choose {listed(BACKENDS)}.")
    return text


def _number(text: str) -> int | float | str:
    """A number if it is one. `resolve_config` refuses other text with the option's name, which argparse would not."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _exit(sentence: str) -> None:
    print(f"error: {sentence}", file=sys.stderr)
    raise SystemExit(2)


def _option(help: str, *, number: bool = False) -> Arg:
    return Arg(help=help, type_parser=_number if number else str)


class KvcServerArgs(ServerArgs, dict=True, kw_only=True):  # type: ignore[call-arg]  # mypy does not read SGLang
    """None means "not given": the defaults are in `KvcConfig` and the policies, because some depend on the policy."""

    kv_backend: A[
        str,
        Arg(
            help="How the KV cache is kept. 'default' is SGLang's own cache, unchanged. 'kvc' keeps it compressed and "
            "shares the compressed pages between all requests with the same prefix.",
            choices=list(BACKENDS),
            type_parser=_backend,
        ),
        NS("memory"),
    ] = "default"
    kvc_policy: A[
        str | None,
        _option(
            f"What is kept, and how precisely: {listed(POLICIES)}. 'quantise' (default) keeps every token in one "
            "format; 'safe' and 'balanced' are 'quantise' in k8v4 and k4v4. 'prune' keeps a fixed share of the pages: "
            "those that --kvc-scorer ranks first, allocated by --kvc-share. 'leankv' keeps, demotes or drops each "
            "token of each head by its attention score. All other names are presets of 'prune'. 'leankv' and scorers "
            "that collect attention scores use later tokens of the request that fills a block, and other requests "
            "with that prefix read the result: see --kvc-trust."
        ),
        NS("memory"),
    ] = None
    kvc_high: A[
        str | None,
        _option(
            f"Page format of the important tokens, named by the bits of keys and values: {listed(FORMATS)}. 'bf16' "
            "compresses nothing. Default: k4v4; k8v4 with policy leankv; presets have their own."
        ),
        NS("memory"),
    ] = None
    kvc_low: A[
        str | None,
        _option(
            "Page format of the less important tokens, of fewer bits than --kvc-high. Policy prune then keeps them "
            "instead of dropping them. Default: k4v2 with policy leankv, k2v2 with mikv, else none."
        ),
        NS("memory"),
    ] = None
    kvc_window: A[
        int | None,
        _option(
            "Recent window: number of latest tokens of a sequence that stay uncompressed. Default: 64; 0 with policy "
            "quantise, whose answers then do not depend on the prefix cache.",
            number=True,
        ),
        NS("memory"),
    ] = None
    kvc_lag: A[
        int | None,
        _option(
            "Policies leankv, and prune with a scorer that collects attention scores: a block that leaves the window "
            "is packed whole in --kvc-high, and tokens of it are dropped or demoted when N tokens follow it and at "
            "least 64 decode queries have read it. With prune, the blocks of an answer then compete for the pages of "
            "the whole answer, again and again as it grows. A multiple of 64 above --kvc-window, like 512. Default: "
            "0, which decides about a block once, when it leaves the window.",
            number=True,
        ),
        NS("memory"),
    ] = None
    kvc_block_size: A[
        int | None,
        _option(
            "Tokens in a block, the unit that is shared, compressed and evicted: a multiple of 64 from 64 to 1024. "
            "The prefix cache finds whole blocks only. Replaces --page-size. Default: 128.",
            number=True,
        ),
        NS("memory"),
    ] = None
    kvc_keep: A[
        float | None,
        _option("Policy prune: share of a block's pages that is kept, above 0 and up to 1. Default: 0.5.", number=True),
        NS("memory"),
    ] = None
    kvc_budget: A[
        str | None,
        _option(
            "Policy prune, instead of --kvc-keep: target size of packed tokens, all metadata included. Either a "
            "compression ratio to bf16, like 4x, or bytes per token on each GPU, like 1200."
        ),
        NS("memory"),
    ] = None
    kvc_scorer: A[
        str | None,
        _option(
            f"Policy prune: ranks the tokens of each head: {listed(SCORERS)}. Settings may follow, like "
            "snapkv:window=64,pool=5. Default: keydiff."
        ),
        NS("memory"),
    ] = None
    kvc_share: A[
        str | None,
        _option(
            f"Policy prune: allocates a block's pages to layers and heads: {listed(SHARES)}. Settings may follow, like "
            "ada:floor=0.3. Default: global."
        ),
        NS("memory"),
    ] = None
    kvc_sinks: A[
        int | None,
        _option("Policy prune: first tokens of a sequence that are never dropped. Default: 4.", number=True),
        NS("memory"),
    ] = None
    kvc_levels: A[
        str | None,
        _option(
            "Policy quantise: formats, separated by commas, that single requests may ask for instead, with "
            'custom_params {"kvc": "k8v4"}. {"kvc": "lossless"} needs no listing. Default: none.'
        ),
        NS("memory"),
    ] = None
    kvc_floor: A[
        str | None,
        _option(
            "Policy quantise: the lowest format that cold blocks of the prefix cache move to when memory is short, "
            "before any is dropped, like k4v4 below k8v4. Blocks of requests that name a format keep it. Default: the "
            "format of --kvc-high, so that no block moves."
        ),
        NS("memory"),
    ] = None
    kvc_allow_lossless: A[
        str | None,
        _option(
            'Whether single requests may ask for an uncompressed cache, with custom_params {"kvc": "lossless"}. '
            "They take several times the memory of other requests. 'true' (default), or 'false': such a request gets "
            "an error."
        ),
        NS("memory"),
    ] = None
    kvc_allow_one_shot: A[
        str | None,
        _option(
            "Policy quantise: whether single requests may ask for a budget of their whole prompt, with custom_params "
            '{"kvc": "one-shot:16x"}. Such a prompt is uncompressed until it is complete, and shares no block. '
            "'true' (default), or 'false': such a request gets an error."
        ),
        NS("memory"),
    ] = None
    kvc_trust: A[
        str | None,
        _option(
            "Which requests may share blocks whose content depends on one request's attention scores: 'all' (default), "
            "or 'salt': requests with the same cache_salt (extra_key); a request without one shares none. Blocks of "
            "other policies depend on their own tokens alone, and are always shared."
        ),
        NS("memory"),
    ] = None
    kvc_calibration: A[
        str | None,
        _option(
            "File that sglang-kvc calibrate wrote for this model. Formats that broke the model there are refused; the "
            "recommended format and LeanKV's thresholds become the defaults; scorer expected-attention and share xkv "
            "read their statistics from it."
        ),
        NS("memory"),
    ] = None
    kvc_alpha_high: A[
        float | None,
        _option(
            "Policy leankv: a token is stored in --kvc-high if its attention score is at least this many times the "
            "average. Default: 1.",
            number=True,
        ),
        NS("memory"),
    ] = None
    kvc_alpha_low: A[
        float | None,
        _option(
            "Policy leankv: a token is dropped if its attention score is less than this many times the average. "
            "Default: 0.02.",
            number=True,
        ),
        NS("memory"),
    ] = None
    kvc_observe: A[
        str | None,
        _option(
            "Policy leankv: queries that attention scores are collected from: 'all' (default; nearly doubles the time "
            "of a prefill), one in 16 ('all/16'), or the last N of a prompt."
        ),
        NS("memory"),
    ] = None
    kvc_page_bytes: A[
        int | None,
        _option(
            "Bytes of a page, the unit of allocation: a multiple of 16. Default: the size that wastes least with the "
            "formats in use.",
            number=True,
        ),
        NS("memory"),
    ] = None
    kvc_memory: A[
        str | None,
        _option(
            "Memory for the KV cache and all its tables, like 4GB or 512MiB. Default: sized by --mem-fraction-static, "
            f"as in SGLang; {MEMORY_CPU} on the CPU."
        ),
        NS("memory"),
    ] = None

    kvc_host_memory: A[
        str | None,
        _option(
            "Host memory on each rank, like 64GB, for blocks that are evicted from the GPU: they keep their compressed "
            "bytes, and come back when a prompt has their prefix. Turns on --enable-hierarchical-cache, whose "
            "--hicache-size gives the same size in gigabytes. Default: 0, none."
        ),
        NS("memory"),
    ] = None

    kvc_eviction: A[
        str | None,
        _option(
            "Which unused blocks are evicted first: 'radix' (default), in the order of --radix-eviction-policy; or "
            "'reuse': those that no prompt is expected to need soon. Each session's pauses are learned from its past, "
            'and custom_params {"kvc_done": true} says that no prompt continues this one.'
        ),
        NS("memory"),
    ] = None

    kvc_disk: A[
        str | None,
        _option(
            "Folder on a local disk for blocks behind host memory. Finished prefixes are written there and found "
            "again, also by the next server with the same model and settings. Needs --kvc-host-memory. Default: none."
        ),
        NS("memory"),
    ] = None

    kvc_disk_size: A[
        str | None,
        _option(
            "Most bytes of files in --kvc-disk on each rank, like 500GB. Default: 80 % of what is free or holds its "
            "files at start."
        ),
        NS("memory"),
    ] = None

    def resolve_once(self) -> None:
        """Check before SGLang's resolution, so that it sees our values, and after it, when the model is known."""
        if getattr(self, "_resolution_finished", False):
            return
        try:
            if self.kv_backend == "kvc":
                _prepare(self)
            else:
                _refuse_strays(self)
            super().resolve_once()
            if self.kv_backend == "kvc":
                self._resolution_finished, self._resolution_failed = False, True  # until it is checked
                _verify(self)
                self._resolution_finished, self._resolution_failed = True, False
        except ConfigError as e:
            if getattr(self, "_from_command_line", False):
                _exit(str(e))
            raise

    @classmethod
    def from_cli_args(cls, args):
        """A record whose resolution ends the process with one sentence, not a traceback, when it cannot be served."""
        made = super().from_cli_args(args)
        made._from_command_line = True
        return made


KVC_OPTIONS = tuple(name for name in KvcServerArgs.__struct_fields__ if name.startswith("kvc_"))


def _refuse_strays(args: KvcServerArgs) -> None:
    if args.kv_backend not in BACKENDS:
        raise ConfigError(f"kv_backend {args.kv_backend!r} does not exist; choose {listed(BACKENDS)}.")
    for name in KVC_OPTIONS:
        if getattr(args, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} has no effect without --kv-backend kvc; add --kv-backend kvc, or drop it."
            )


def _prepare(args: KvcServerArgs) -> None:
    """Refuse arguments that cannot be served, then set the fields of SGLang that select our classes."""
    if args.enable_hierarchical_cache and args.kvc_host_memory is None:
        args.kvc_host_memory = host_memory_of(args)
    config = resolve_config(args)
    check_args(args, config)
    trust = None if args.disable_radix_cache else trust_warning(config)
    cpu = _on_cpu(args)
    for warning in [*environment_warnings(), *ignored_warnings(args, cpu=cpu), *([trust] if trust else [])]:
        logger.warning(warning)
    if args.chunked_prefill_size is not None and args.chunked_prefill_size <= 0:
        logger.warning("Without chunked prefill a whole prompt must fit into the KV cache uncompressed.")

    check_memory_saver(config, args.enable_memory_saver, cpu)
    check_dp_attention(args, config, cpu)
    if cpu:
        _check_platform()
    if config.memory is not None:
        check_memory(config, _device_bytes("cpu" if cpu else "cuda"))
    args.attention_backend = "kvc"
    args.prefill_attention_backend = None
    args.decode_attention_backend = None
    args.radix_cache_backend = "kvc"
    args.page_size = config.block_size
    args.enable_session_radix_cache |= args.enable_streaming_session  # their blocks are evicted last
    args.enable_hierarchical_cache = config.host_memory > 0
    if config.host_memory:
        # A size of SGLang's own pool, which is never built, keeps it from sizing one by what is free.
        args.hicache_size = max(1, round(config.host_memory / 1e9))
    if args.max_running_requests is None:
        args.max_running_requests = MAX_RUNNING_REQUESTS_CPU if cpu else MAX_RUNNING_REQUESTS
    if args.cuda_graph_max_bs_prefill is None and args.cuda_graph_bs_prefill is None:
        most = (MAX_PREFILL_GRAPH, args.max_total_tokens, args.chunked_prefill_size)
        args.cuda_graph_max_bs_prefill = min(n for n in most if n is not None and n > 0)
    if cpu:
        args.device = "cpu"
        args.disable_overlap_schedule = True
        args.enable_torch_compile = False  # SGLang compiles a CPU's forward for kernels that are not installed
        args.sleep_on_idle = True  # a waiting scheduler would spin on a core that also computes
        args.cuda_graph_backend_decode = args.cuda_graph_backend_prefill = "disabled"
        if args.kvc_memory is None and args.mem_fraction_static is None and args.max_total_tokens is None:
            args.kvc_memory = MEMORY_CPU


def _verify(args: KvcServerArgs) -> None:
    """Checks after SGLang's resolution: the model's config is known, and SGLang may have changed our fields for it."""
    resolved: Any = resolving_view(args)
    if resolved.model_path.lower() in ("none", "dummy"):
        return  # SGLang resolves nothing
    config = resolve_config(args)
    model = model_config_of(args)
    facts = from_model_config(model)
    check_facts(facts, config)
    heads = model.get_num_kv_heads(max(1, resolved.tp_size // resolved.attn_dp_size))
    for sentence in wasted_levels(config, head_dim=facts.head_dim):
        logger.warning(sentence)
    check_pool(config, layers=model.num_attention_layers, heads=heads, head_dim=facts.head_dim)
    for name, wanted in (
        ("attention_backend", "kvc"),
        ("radix_cache_backend", "kvc"),
        ("page_size", config.block_size),
    ):
        got = getattr(resolved, name)
        if got != wanted:
            raise ConfigError(
                f"The model {facts.name} cannot be served with --kv-backend kvc, because SGLang sets "
                f"{name}={got} for it; serve it with --kv-backend default."
            )
    check_chunk(resolved.chunked_prefill_size, config)
    check_pool_sizing(post_capture_kv_sizing_planned(args))
    graphs = resolved.cuda_graph_config
    if graphs.prefill.backend not in PREFILL_GRAPHS or _on_cpu(args):  # SGLang's choice: `check_args` refuses a user's
        graphs = with_phase(graphs, Phase.PREFILL, backend=Backend.DISABLED)
        declare_resolution(args, __name__, cuda_graph_config=graphs)


def _on_cpu(args: KvcServerArgs) -> bool:
    if args.device is not None:
        return args.device.split(":")[0] == "cpu"
    return not torch.cuda.is_available()


def _check_platform() -> None:
    """SGLang chooses its platform when it is imported, before it knows the keywords of an `Engine`."""
    # Late: importing the name would choose the platform.
    from sglang.srt.platforms import current_platform
    from sglang.srt.platforms.interface import SRTPlatform

    if type(current_platform) is SRTPlatform:
        raise ConfigError(
            "kv_backend kvc cannot be served here, because SGLang found no platform for a machine without an "
            f"accelerator; set the environment variable SGLANG_PLATFORM={CPU_PLATFORM} before sglang is imported."
        )


def _device_bytes(device: str) -> float | None:
    """Total memory of the device. SGLang asks the driver's tools, so no CUDA context is made here."""
    from sglang.srt.utils.common import get_device_memory_capacity

    megabytes = get_device_memory_capacity(device)
    return None if megabytes is None else megabytes * (1 << 20)
