"""`KvcServerArgs`: SGLang's server arguments plus `--kv-backend` and the `--kvc-*` options.

Server arguments are pickled into child processes, which unpickle them before any plugin is loaded. Importing this
module must therefore suffice to unpickle them, and must change nothing else. Written against SGLang 0.5.23:
`ServerArgs.resolve_once(self)`, `ServerArgs.from_cli_args(cls, args)`, `A`/`Arg`/`NS` of `arg_groups.arg_utils`.
`start` checks the arguments.
"""

import sys

from sglang.srt.arg_groups.arg_utils import NS, A, Arg
from sglang.srt.server_args import ServerArgs

from kvc_kernels.formats import FORMATS
from sglang_kvc.errors import ConfigError, listed
from sglang_kvc.options.start import MEMORY_CPU, prepare, verify
from sglang_kvc.policies import POLICIES, SCORERS, SHARES

BACKENDS = ("default", "kvc")


def _backend(text: str) -> str:
    """Refuse an unknown backend in one sentence (argparse would print every option of the server first)."""
    if text not in BACKENDS:
        _exit(f"--kv-backend {text!r} does not exist; choose {listed(BACKENDS)}.")
    return text


def _number(text: str) -> int | float | str:
    """A number if `text` is one. `resolve_config` refuses other text and names the option, which argparse would not."""
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
    """None means "not given". The defaults are in `KvcConfig` and in the policies, because some depend on the
    policy."""

    kv_backend: A[
        str,
        Arg(
            help="KV cache of the server: 'default', SGLang's own, or 'kvc', which keeps the cache compressed and "
            "shares the compressed pages between all requests with the same prefix.",
            choices=list(BACKENDS),
            type_parser=_backend,
        ),
        NS("memory"),
    ] = "default"
    kvc_policy: A[
        str | None,
        _option(
            f"Which tokens are kept, and at which precision: {listed(POLICIES)}. 'quantize' (default) keeps every "
            "token in one format; 'safe' and 'balanced' are 'quantize' in k8v4 and k4v4. 'prune' keeps a fixed share "
            "of the pages: those that --kvc-scorer ranks first, allocated by --kvc-share. 'leankv' keeps, demotes or "
            "drops each token of each head by its attention score. All other names are presets of 'prune'. 'leankv' "
            "and scorers that collect attention scores use later tokens of the request that fills a block; --kvc-trust "
            "says which other requests read such blocks."
        ),
        NS("memory"),
    ] = None
    kvc_high: A[
        str | None,
        _option(
            f"Page format of the important tokens, named by the bits of keys and values: {listed(FORMATS)}. 'bf16' "
            "compresses nothing. Default: k4v4; k8v4 with policy leankv; presets set their own."
        ),
        NS("memory"),
    ] = None
    kvc_low: A[
        str | None,
        _option(
            "Page format of the less important tokens, of fewer bits than --kvc-high. Policy prune then keeps them "
            "instead of dropping them. Default: k4v2 with policies leankv and arkv, k2v2 with mikv, else none."
        ),
        NS("memory"),
    ] = None
    kvc_window: A[
        int | None,
        _option(
            "Recent window: number of latest tokens of a sequence that stay uncompressed. Default: 64; 128 with "
            "policy minikv; 0 with quantize, safe and balanced, whose answers then do not depend on the prefix cache.",
            number=True,
        ),
        NS("memory"),
    ] = None
    kvc_lag: A[
        int | None,
        _option(
            "Policies leankv, and prune with a scorer that collects attention scores: a block that leaves the window "
            "is first packed in --kvc-high with all its tokens. Its tokens are dropped or demoted when N more tokens "
            "follow it, of which at least 64 decode queries have read it. With prune, the blocks of an answer then "
            "compete for the pages of the whole answer, repeatedly as it grows. A multiple of 64 above --kvc-window, "
            "like 512. Default: 0, which plans a block once, when it leaves the window.",
            number=True,
        ),
        NS("memory"),
    ] = None
    kvc_block_size: A[
        int | None,
        _option(
            "Tokens in a block, the unit that is shared, compressed and evicted: a multiple of 64 from 64 to 1024. "
            "The prefix cache matches only full blocks. Replaces --page-size. Default: 128.",
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
            "compression ratio to bf16, like 4x, or bytes per token over all layers of a rank, like 20000."
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
        _option(
            "Policy prune: first tokens of a sequence that are never dropped. Default: 4; 0 with quota and max.",
            number=True,
        ),
        NS("memory"),
    ] = None
    kvc_levels: A[
        str | None,
        _option(
            "Policy quantize: formats, separated by commas, that single requests may ask for instead, with "
            'custom_params {"kvc": "k8v4"}. {"kvc": "lossless"} needs no listing. Default: none.'
        ),
        NS("memory"),
    ] = None
    kvc_floor: A[
        str | None,
        _option(
            "Policy quantize: the lowest format that cold blocks of the prefix cache move to when memory is short, "
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
            "Policy quantize: whether single requests may ask for a budget of their whole prompt, with custom_params "
            '{"kvc": "one-shot:16x"}. Such a prompt shares no block. '
            "'true' (default), or 'false': such a request gets an error."
        ),
        NS("memory"),
    ] = None
    kvc_one_shot: A[
        str | None,
        _option(
            "Policy quantize: budget of the prompts of all requests that name no quality: a compression ratio to bf16 "
            "up to 64x, like 16x, or the tokens that a head keeps on average, 65 or more, like 1024. Such a prompt "
            'shares no block. custom_params {"kvc": "k4v4"} asks for the server\'s format instead. Default: none.'
        ),
        NS("memory"),
    ] = None
    kvc_trust: A[
        str | None,
        _option(
            "Which requests may share blocks whose content depends on one request's attention scores: those "
            "with the same cache_salt (extra_key) ('salt', default; a request without one shares none), or 'all'. "
            "Blocks of other policies depend on their own tokens alone, and are always shared."
        ),
        NS("memory"),
    ] = None
    kvc_calibration: A[
        str | None,
        _option(
            "File that sglang-kvc calibrate wrote for this model. Formats that broke the model there are refused; the "
            "recommended format, LeanKV's thresholds and, with share xkv, the tokens found by calibrate --retention "
            "become the defaults. Some scorers and shares, like expected-attention and xkv, read their statistics from "
            "it."
        ),
        NS("memory"),
    ] = None
    kvc_alpha_high: A[
        float | None,
        _option(
            "Policy leankv: a token is stored in --kvc-high if its attention score is at least this many times the "
            "average. 0 stores all tokens there that are not dropped. Default: 1.",
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
            "Policy leankv: queries that attention scores are collected from: 'all' (default; adds about half the time "
            "of a 16K-token prefill), one in 16 ('all/16'), or the last N of a prompt."
        ),
        NS("memory"),
    ] = None
    kvc_page_bytes: A[
        int | None,
        _option(
            "Bytes of a page, the unit of allocation: a multiple of 16. Default: the size with the least waste for the "
            "formats in use.",
            number=True,
        ),
        NS("memory"),
    ] = None
    kvc_memory: A[
        str | None,
        _option(
            "Memory on each rank for the KV cache and all its tables, like 4GB or 512MiB. Default: sized by "
            f"--mem-fraction-static, as in SGLang; {MEMORY_CPU} on the CPU."
        ),
        NS("memory"),
    ] = None

    kvc_host_memory: A[
        str | None,
        _option(
            "Host memory on each rank, like 64GB, for blocks that are evicted from the GPU. They stay compressed, and "
            "return when a prompt has their prefix. Turns on --enable-hierarchical-cache, whose --hicache-size sets "
            "the same size in gigabytes. Default: 0, none."
        ),
        NS("memory"),
    ] = None

    kvc_eviction: A[
        str | None,
        _option(
            "Which unused blocks are evicted first: 'radix' (default), in the order of --radix-eviction-policy; or "
            "'reuse': those that no prompt is expected to need soon. The server learns each session's pauses, and a "
            'request with custom_params {"kvc_done": true} says that no prompt continues it; "kvc_ttl" gives the '
            'seconds to expect one, and "kvc_steps" the steps until one comes.'
        ),
        NS("memory"),
    ] = None

    kvc_running_share: A[
        float | None,
        _option(
            "Share of the KV cache that running requests may hold when another prompt needs an eviction, like 0.5. The "
            "prompt then waits, so that the sessions of paused agents stay cached. 1: no limit. Default: 1, and 0.5 "
            "while the cache is far too small for all sessions and the limit helps."
        ),
        NS("memory"),
    ] = None

    kvc_disk: A[
        str | None,
        _option(
            "Folder on a local disk for blocks of finished prefixes, which this server and the next one with the same "
            "model and settings can read. Needs --kvc-host-memory. Default: none."
        ),
        NS("memory"),
    ] = None

    kvc_disk_size: A[
        str | None,
        _option(
            "Maximum bytes of files in --kvc-disk on each rank, like 500GB. Default: 80 % of its files and of a "
            "rank's part of the free space at start."
        ),
        NS("memory"),
    ] = None

    def resolve_once(self) -> None:
        """Check before SGLang's resolution, which then sees our values, and again after it, when the model is known."""
        if getattr(self, "_resolution_finished", False):
            return
        try:
            if self.kv_backend == "kvc":
                prepare(self)
            else:
                _refuse_unused_options(self)
            super().resolve_once()
            if self.kv_backend == "kvc":
                self._resolution_finished, self._resolution_failed = False, True  # until `verify` passes
                verify(self)
                self._resolution_finished, self._resolution_failed = True, False
        except ConfigError as e:
            if getattr(self, "_from_command_line", False):
                _exit(str(e))
            raise

    @classmethod
    def from_cli_args(cls, args):
        """Arguments whose resolution ends the process with one sentence instead of a traceback if they cannot be
        served."""
        server_args = super().from_cli_args(args)
        server_args._from_command_line = True
        return server_args


KVC_OPTIONS = tuple(name for name in KvcServerArgs.__struct_fields__ if name.startswith("kvc_"))


def _refuse_unused_options(args: KvcServerArgs) -> None:
    if args.kv_backend not in BACKENDS:
        raise ConfigError(f"kv_backend {args.kv_backend!r} does not exist; choose {listed(BACKENDS)}.")
    for name in KVC_OPTIONS:
        if getattr(args, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} has no effect without --kv-backend kvc; add --kv-backend kvc, or drop it."
            )
