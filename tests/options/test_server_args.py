"""The options on SGLang's command line, in YAML, as keywords; transport to child processes; stock stays stock."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from kvc_kernels.ops import ScoreSampling
from sglang_kvc.errors import ConfigError
from sglang_kvc.options.config import KvcConfig
from sglang_kvc.options.resolve import resolve_config

from .conftest import one_sentence

pytestmark = pytest.mark.usefixtures("server_args")


def test_kvc_selects_our_parts(parse):
    args = parse("--kv-backend", "kvc")
    assert (args.attention_backend, args.radix_cache_backend, args.page_size) == ("kvc", "kvc", 128)
    assert args.prefill_attention_backend is None and args.decode_attention_backend is None
    assert args.cuda_graph_config.prefill.backend == "disabled"
    assert resolve_config(args) == KvcConfig(memory=10**9)


def test_cpu_is_served_without_more_options(parse):
    args = parse("--kv-backend", "kvc")
    assert args.device == "cpu" and args.disable_overlap_schedule
    assert args.cuda_graph_config.decode.backend == "disabled"
    assert args.max_running_requests == 32 and args.kvc_memory == "1GB"
    chosen = parse("--kv-backend", "kvc", "--max-running-requests", "7", "--max-total-tokens", "9000")
    assert chosen.max_running_requests == 7 and chosen.kvc_memory is None


@pytest.fixture
def on_a_gpu():
    """The arguments as they are prepared for a GPU, which need not be there."""
    from sglang_kvc.options.server_args import KvcServerArgs, _prepare

    def prepare(**options):
        args = object.__new__(KvcServerArgs)
        for f in dataclasses.fields(KvcServerArgs):
            has_default = f.default is not dataclasses.MISSING
            object.__setattr__(args, f.name, f.default if has_default else None)
        for name, value in {"device": "cuda", **options}.items():
            object.__setattr__(args, name, value)
        _prepare(args)
        return args

    return prepare


def test_gpu_keeps_overlap_and_graphs(on_a_gpu):
    args = on_a_gpu()
    assert args.max_running_requests == 256 and not args.disable_overlap_schedule
    assert args.cuda_graph_backend_decode is None and args.cuda_graph_backend_prefill is None
    assert args.kvc_memory is None and args.cuda_graph_max_bs_prefill == 2048
    assert on_a_gpu(chunked_prefill_size=512).cuda_graph_max_bs_prefill == 512
    assert on_a_gpu(chunked_prefill_size=-1, max_total_tokens=1024).cuda_graph_max_bs_prefill == 1024
    assert on_a_gpu(cuda_graph_max_bs_prefill=8192).cuda_graph_max_bs_prefill == 8192
    assert on_a_gpu(cuda_graph_bs_prefill=[16, 4096]).cuda_graph_max_bs_prefill is None


@pytest.mark.parametrize(
    ("device", "chosen", "served"),
    [
        ("cuda", "breakable", "breakable"),
        ("cuda", "tc_piecewise", "disabled"),  # SGLang's choice for some models with images
        ("cuda", "disabled", "disabled"),
        ("cpu", "breakable", "disabled"),
    ],
)
def test_prefill_graphs_are_broken_at_attention_or_none(parse, device, chosen, served):
    from sglang_kvc.options.server_args import _verify

    args = parse("--kv-backend", "kvc")
    object.__setattr__(args, "device", device)  # SGLang's own setter refuses once arguments are resolved
    args.cuda_graph_config.prefill.backend = chosen
    _verify(args)
    assert args.cuda_graph_config.prefill.backend == served


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "leankv"},
        {"policy": "h2o"},
        {"policy": "leankv", "observe": "16"},
        {"policy": "kv-compress"},
        {"policy": "prune", "scorer": "kv-compress:power=1,skip=8"},
    ],
)
def test_gpu_keeps_decode_graphs_where_kernels_collect_attention(on_a_gpu, options, caplog):
    args = on_a_gpu(**{f"kvc_{k}": v for k, v in options.items()})
    assert args.cuda_graph_backend_decode is None and "CUDA graphs" not in caplog.text


ALL = {
    "kvc_policy": "leankv",
    "kvc_high": "k8v8",
    "kvc_low": "k4v4",
    "kvc_window": 32,
    "kvc_block_size": 128,
    "kvc_alpha_high": 1.5,
    "kvc_alpha_low": 0.1,
    "kvc_observe": "16",
    "kvc_page_bytes": 4096,
    "kvc_memory": "64MiB",
}
RESOLVED = KvcConfig("leankv", "k8v8", "k4v4", 32, 128, 0.5, 1.5, 0.1, ScoreSampling(16), 4096, 64 << 20)


def flags(options: dict) -> list[str]:
    return [word for k, v in options.items() for word in ("--" + k.replace("_", "-"), str(v))]


def test_command_line_yaml_and_keywords_agree(parse, model, tmp_path):
    import yaml

    from sglang_kvc.options.server_args import KvcServerArgs

    by_flags = parse("--kv-backend", "kvc", *flags(ALL))
    file = tmp_path / "server.yaml"
    file.write_text(yaml.safe_dump({"kv-backend": "kvc", **{k.replace("_", "-"): v for k, v in ALL.items()}}))
    by_file = parse("--config", str(file))
    by_keywords = KvcServerArgs(model_path=model, device="cpu", kv_backend="kvc", **ALL)
    for args in (by_flags, by_file, by_keywords):
        assert resolve_config(args) == RESOLVED
        assert args.page_size == 128
        assert {k: getattr(args, k) for k in ALL} == ALL


def test_a_composed_policy_by_flags(parse):
    given = {
        "kvc_policy": "prune",
        "kvc_scorer": "snapkv:window=64,pool=5",
        "kvc_share": "ada:floor=0.3",
        "kvc_budget": "1200",
        "kvc_sinks": 8,
    }
    args = parse("--kv-backend", "kvc", *flags(given))
    assert {k: getattr(args, k) for k in given} == given
    config = resolve_config(args)
    told = config.to_dict()
    assert {f"kvc_{k}": told[k] for k in ("policy", "scorer", "share", "budget", "sinks")} == given


def test_pickle_asdict_and_a_second_resolution(parse):
    args = parse("--kv-backend", "kvc", *flags(ALL))
    as_dict = dataclasses.asdict(args)
    assert dataclasses.asdict(pickle.loads(pickle.dumps(args))) == as_dict
    # SGLang's offline benchmark builds an engine from the resolved values.
    assert dataclasses.asdict(type(args)(**as_dict)) == as_dict


def test_values_reach_the_runtime_context(parse):
    from sglang.srt.arg_groups.arg_utils import namespace_of

    from sglang_kvc.options.server_args import KVC_OPTIONS, KvcServerArgs

    spaces = namespace_of(KvcServerArgs)
    assert all(spaces[name] == "memory" for name in ("kv_backend", *KVC_OPTIONS))


def test_default_is_stock_field_by_field(parse, model):
    from sglang_kvc.options.server_args import KvcServerArgs

    stock_class = KvcServerArgs.__mro__[1]
    ours = dataclasses.asdict(parse("--random-seed", "1"))
    stock = dataclasses.asdict(stock_class(model_path=model, device="cpu", random_seed=1))
    extra = {k: ours.pop(k) for k in set(ours) - set(stock)}
    assert ours == stock
    assert extra.pop("kv_backend") == "default"
    assert set(extra.values()) == {None}


def test_stock_defaults_are_inherited():
    from sglang_kvc.options.server_args import KvcServerArgs

    stock = {f.name: f for f in dataclasses.fields(KvcServerArgs.__mro__[1])}
    ours = {f.name: f for f in dataclasses.fields(KvcServerArgs)}
    assert all(ours[name] is field for name, field in stock.items())


@pytest.mark.parametrize("option", sorted(ALL))
def test_options_without_the_backend_are_refused(parse, capsys, option):
    with pytest.raises(SystemExit) as e:
        parse(*flags({option: ALL[option]}))
    assert e.value.code == 2
    assert flags({option: 0})[0] in one_sentence(capsys.readouterr().err)


@pytest.mark.parametrize(
    "argv, word",
    [
        (["--kv-backend", "turbo"], "--kv-backend"),
        (["--kv-backend", "kvc", "--kvc-block-size", "7"], "--kvc-block-size"),
        (["--kv-backend", "kvc", "--kvc-block-size", "seven"], "--kvc-block-size"),
        (["--kv-backend", "kvc", "--kvc-memory", "900TB"], "--kvc-memory"),
        (["--kv-backend", "kvc", "--page-size", "64"], "--page-size"),
        (["--kv-backend", "kvc", "--chunked-prefill-size", "300"], "--chunked-prefill-size"),
        (["--kv-backend", "kvc", "--enable-hierarchical-cache"], "--enable-hierarchical-cache"),
    ],
)
def test_command_line_errors_are_one_sentence(parse, capsys, argv, word):
    with pytest.raises(SystemExit) as e:
        parse(*argv)
    assert e.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and word in one_sentence(err)


def test_keywords_raise_value_errors(model):
    from sglang_kvc.options.server_args import KvcServerArgs

    with pytest.raises(ConfigError, match="turbo"):
        KvcServerArgs(model_path=model, device="cpu", kv_backend="turbo")
    with pytest.raises(ConfigError, match="kvc-keep"):
        KvcServerArgs(model_path=model, device="cpu", kv_backend="kvc", kvc_keep=0.5)


def test_engine_takes_our_options(server_args, model):
    """`sglang.Engine(kv_backend=...)` builds its arguments from this class attribute."""
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.plugins.hook_registry import HookRegistry

    from kvc_patches import server_args as patch
    from sglang_kvc.options.server_args import KvcServerArgs

    if Engine.server_args_class is not KvcServerArgs:  # the module was imported before the options came in force
        patch.register()
        HookRegistry.apply_hooks()
    args = Engine.server_args_class(model_path=model, device="cpu", kv_backend="kvc", kvc_policy="leankv")
    assert args.attention_backend == "kvc" and resolve_config(args).low == "k4v2"


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["launch_server", "serve"])
def test_a_real_start_with_a_wrong_value(entry, model):
    """Exit code and stderr as a user sees them; nothing is started."""
    python = Path(sys.executable)
    command = {"launch_server": [python, "-m", "sglang.launch_server"], "serve": [python.with_name("sglang"), "serve"]}
    argv = ["--model-path", model, "--device", "cpu", "--kv-backend", "kvc", "--kvc-block-size", "7"]
    done = subprocess.run([*command[entry], *argv], capture_output=True, text=True, timeout=300)
    assert done.returncode != 0, done.stderr[-2000:]
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "--kvc-block-size 7" in one_sentence(errors[0])
    assert "Traceback" not in done.stderr, done.stderr[-2000:]
