"""The options on SGLang's command line, in YAML and as keywords; their transport to child processes; unchanged stock
behavior."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvc_kernels.ops import ScoreSampling
from sglang_kvc.errors import ConfigError
from sglang_kvc.options.config import KvcConfig
from sglang_kvc.options.resolve import resolve_config

from .conftest import one_sentence, resolved

pytestmark = pytest.mark.usefixtures("server_args")


def test_kvc_backend_selects_attention_cache_and_page_size(parse):
    args = parse("--kv-backend", "kvc")
    view = resolved(args)
    assert (view.attention_backend, view.radix_cache_backend, view.page_size) == ("kvc", "kvc", 128)
    assert view.prefill_attention_backend is None and view.decode_attention_backend is None
    assert view.cuda_graph_config.prefill.backend == "disabled"
    assert resolve_config(args) == resolve_config(view) == KvcConfig(memory=10**9)


def test_cpu_needs_no_further_options(parse):
    args = resolved(parse("--kv-backend", "kvc"))
    assert args.device == "cpu" and args.disable_overlap_schedule
    assert args.cuda_graph_config.decode.backend == "disabled"
    assert args.max_running_requests == 32 and args.kvc_memory == "1GB"
    assert not resolved(parse("--kv-backend", "kvc", "--enable-torch-compile")).enable_torch_compile
    whole = parse("--kv-backend", "kvc", "--chunked-prefill-size", "-1")
    assert resolved(whole).mem_fraction_static == 0.5  # SGLang's default is negative on a machine with 24 GB
    chosen = resolved(parse("--kv-backend", "kvc", "--max-running-requests", "7", "--max-total-tokens", "9000"))
    assert chosen.max_running_requests == 7 and chosen.kvc_memory is None


@pytest.fixture
def on_a_gpu():
    """The arguments as prepared for a GPU, which need not be present."""
    from sglang_kvc.options.server_args import KvcServerArgs
    from sglang_kvc.options.start import prepare

    def prepared(**options):
        args = KvcServerArgs(model_path="m", device="cuda", kv_backend="kvc", **options)
        prepare(args)
        return args

    return prepared


def test_gpu_keeps_overlap_and_graphs(on_a_gpu):
    args = on_a_gpu()
    assert args.max_running_requests == 256 and not args.disable_overlap_schedule
    assert args.cuda_graph_backend_decode is None and args.cuda_graph_backend_prefill is None
    assert args.kvc_memory is None and args.cuda_graph_max_bs_prefill == 2048
    assert on_a_gpu(enable_torch_compile=True).enable_torch_compile
    assert on_a_gpu(chunked_prefill_size=512).cuda_graph_max_bs_prefill == 512
    assert on_a_gpu(chunked_prefill_size=-1, max_total_tokens=1024).cuda_graph_max_bs_prefill == 1024
    assert on_a_gpu(cuda_graph_max_bs_prefill=8192).cuda_graph_max_bs_prefill == 8192
    assert on_a_gpu(cuda_graph_bs_prefill=[16, 4096]).cuda_graph_max_bs_prefill is None


def test_host_memory_must_fit_into_free_memory(on_a_gpu, monkeypatch):
    """SGLang's figure counts, which knows a container's limit."""
    from sglang_kvc.options import start

    monkeypatch.setattr(start, "available_host_memory_bytes", lambda allow_cgroup_fallback: 10 * 10**9)
    on_a_gpu(kvc_host_memory="10GB")
    with pytest.raises(ConfigError) as e:
        on_a_gpu(kvc_host_memory="6GB", tp_size=2)
    assert "6 GB on each of 2 ranks" in one_sentence(str(e.value)) and "container (10.0 GB)" in str(e.value)
    with pytest.raises(ConfigError):
        on_a_gpu(enable_hierarchical_cache=True, hicache_size=11)


@pytest.mark.parametrize(
    ("device", "chosen", "served"),
    [
        ("cuda", "breakable", "breakable"),
        ("cuda", "full", "disabled"),
        ("cuda", "disabled", "disabled"),
        ("cpu", "breakable", "disabled"),
    ],
)
def test_prefill_graphs_are_breakable_or_disabled(parse, device, chosen, served):
    from sglang.srt.arg_groups.overrides import declare_resolution
    from sglang.srt.model_executor.cuda_graph_config import with_phase

    from sglang_kvc.options.start import verify

    args = parse("--kv-backend", "kvc")
    msgspec.Struct.__setattr__(args, "device", device)  # SGLang's own setter refuses once arguments are resolved
    graphs = with_phase(resolved(args).cuda_graph_config, "prefill", backend=chosen)
    declare_resolution(args, "SGLang", cuda_graph_config=graphs)
    verify(args)
    assert resolved(args).cuda_graph_config.prefill.backend == served


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
def test_gpu_keeps_decode_graphs_when_kernels_collect_attention(on_a_gpu, options, caplog):
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
    "kvc_page_bytes": 4608,
    "kvc_memory": "64MiB",
}
RESOLVED = KvcConfig("leankv", "k8v8", "k4v4", 32, 128, 0.5, 1.5, 0.1, ScoreSampling(16), 4608, 64 << 20)


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
    by_keywords.resolve_once()
    for args in (by_flags, by_file, by_keywords):
        assert resolve_config(args) == RESOLVED
        assert resolved(args).page_size == 128
        assert {k: getattr(args, k) for k in ALL} == ALL


def test_flags_compose_policy(parse):
    given = {
        "kvc_policy": "prune",
        "kvc_scorer": "snapkv:window=64,pool=5",
        "kvc_share": "ada:floor=0.3",
        "kvc_budget": "200",
        "kvc_sinks": 8,
    }
    args = parse("--kv-backend", "kvc", *flags(given))
    assert {k: getattr(args, k) for k in given} == given
    config = resolve_config(args)
    reported = config.to_dict()
    assert {f"kvc_{k}": reported[k] for k in ("policy", "scorer", "share", "budget", "sinks")} == given


@pytest.fixture
def checks(monkeypatch):
    """Names of the checks that run, in order."""
    from sglang_kvc.options import server_args as module

    names = []
    for name in ("prepare", "verify", "_refuse_unused_options"):
        check = getattr(module, name)
        monkeypatch.setattr(module, name, lambda args, name=name, check=check: (names.append(name), check(args))[1])
    return names


def test_pickling_keeps_given_and_resolved_values(parse, checks):
    args = parse("--kv-backend", "kvc", *flags(ALL))
    child = pickle.loads(pickle.dumps(args))
    assert type(child) is type(args)
    assert msgspec.structs.asdict(child) == msgspec.structs.asdict(args)
    assert child.resolved_dict() == args.resolved_dict()
    assert {k: getattr(child, k) for k in ALL} == ALL and resolve_config(child) == RESOLVED
    child.resolve_once()
    args.resolve_once()
    assert checks == ["prepare", "verify"]


def test_unresolved_record_can_be_pickled(server_args, model, checks):
    args = server_args.ServerArgs(model_path=model, device="cpu", kv_backend="kvc", **ALL)
    child = pickle.loads(pickle.dumps(args))
    assert checks == [] and child.attention_backend is None
    child.resolve_once()
    assert checks == ["prepare", "verify"] and resolved(child).attention_backend == "kvc"


def test_record_can_be_rebuilt_from_resolved_values(parse, model):
    """The values in /server_info, passed as keywords, give an equal record."""

    def changes(args) -> dict:
        args.resolve_once()
        before = args.resolved_dict()
        again = type(args)(**{**before, "cuda_graph_config": resolved(args).cuda_graph_config})
        again.resolve_once()
        after = again.resolved_dict()
        return {name: (value, after[name]) for name, value in before.items() if after[name] != value}

    args = parse("--kv-backend", "kvc", "--random-seed", "1", *flags(ALL))
    stock = type(args).__mro__[1](model_path=model, device="cpu", random_seed=1)
    assert changes(args).keys() <= changes(stock).keys()


def test_rejected_record_stays_rejected(make_model):
    """This includes errors from the model's config, which is known after SGLang's own resolution."""
    from sglang_kvc.options.server_args import KvcServerArgs

    args = KvcServerArgs(model_path=make_model(head_dim=80), device="cpu", kv_backend="kvc")
    with pytest.raises(ConfigError, match="head size"):
        args.resolve_once()
    for record in (args, pickle.loads(pickle.dumps(args))):
        with pytest.raises(RuntimeError, match="already failed"):
            record.resolve_once()
    args = KvcServerArgs(model_path="m", device="cpu", kv_backend="kvc", page_size=64)
    for _ in range(2):
        with pytest.raises(ConfigError, match="--page-size"):
            args.resolve_once()


def test_values_reach_runtime_context(parse):
    from sglang.srt.arg_groups.arg_utils import namespace_of
    from sglang.srt.runtime_context import create_context

    from sglang_kvc.options.server_args import KVC_OPTIONS, KvcServerArgs

    spaces = namespace_of(KvcServerArgs)
    assert all(spaces[name] == "memory" for name in ("kv_backend", *KVC_OPTIONS))
    memory = create_context(parse("--kv-backend", "kvc", *flags(ALL)), role="scheduler").config_bag("memory")
    assert {name: getattr(memory, name) for name in ALL} == ALL and memory.kv_backend == "kvc"


def test_default_record_equals_stock_field_by_field(parse, model):
    from sglang_kvc.options.server_args import KvcServerArgs

    args = parse("--random-seed", "1")
    stock_args = KvcServerArgs.__mro__[1](model_path=model, device="cpu", random_seed=1)
    stock_args.resolve_once()
    given, stock_given = msgspec.structs.asdict(args), msgspec.structs.asdict(stock_args)
    assert {k: given[k] for k in stock_given} == stock_given
    ours, stock = args.resolved_dict(), stock_args.resolved_dict()
    extra = {k: ours.pop(k) for k in set(ours) - set(stock)}
    assert ours == stock
    assert extra.pop("kv_backend") == "default"
    assert set(extra.values()) == {None}


def test_stock_defaults_are_inherited():
    from sglang_kvc.options.server_args import KvcServerArgs

    def described(field):
        return field.encode_name, field.type, field.default, field.default_factory

    stock, ours = (
        {f.name: described(f) for f in msgspec.structs.fields(c)} for c in (KvcServerArgs.__mro__[1], KvcServerArgs)
    )
    assert {name: ours[name] for name in stock} == stock
    assert KvcServerArgs("m", "t").tokenizer_path == "t"  # positional, as in SGLang


@pytest.mark.parametrize("option", sorted(ALL))
def test_options_without_backend_are_rejected(parse, capsys, option):
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

    assert issubclass(ConfigError, ValueError)
    with pytest.raises(ConfigError, match="turbo"):
        KvcServerArgs(model_path=model, device="cpu", kv_backend="turbo").resolve_once()
    with pytest.raises(ConfigError, match="kvc-keep"):
        KvcServerArgs(model_path=model, device="cpu", kv_backend="kvc", kvc_keep=0.5).resolve_once()


def test_engine_accepts_kvc_options(server_args, model):
    """`sglang.Engine(kv_backend=...)` builds its arguments from this class attribute."""
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.plugins.hook_registry import HookRegistry

    from kvc_patches import server_args as patch
    from sglang_kvc.options.server_args import KvcServerArgs

    if Engine.server_args_class is not KvcServerArgs:  # the module was imported before the options were active
        patch.register()
        HookRegistry.apply_hooks()
    args = Engine.server_args_class(model_path=model, device="cpu", kv_backend="kvc", kvc_policy="leankv")
    args.resolve_once()
    assert resolved(args).attention_backend == "kvc" and resolve_config(args).low == "k4v2"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entry", "option", "value"),
    [
        ("launch_server", "--kvc-block-size", "7"),
        ("serve", "--kvc-budget", "100x"),  # checked against the model's config file
    ],
)
def test_server_start_with_wrong_value_prints_one_sentence(entry, option, value, model):
    """Checks exit code and stderr as a user sees them; nothing is started."""
    python = Path(sys.executable)
    command = {"launch_server": [python, "-m", "sglang.launch_server"], "serve": [python.with_name("sglang"), "serve"]}
    argv = ["--model-path", model, "--device", "cpu", "--kv-backend", "kvc", "--kvc-policy", "prune", option, value]
    done = subprocess.run([*command[entry], *argv], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stderr[-2000:]
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and f"{option} {value}" in one_sentence(errors[0])
    assert "Traceback" not in done.stderr, done.stderr[-2000:]


@pytest.mark.slow
def test_engine_with_wrong_value_raises_config_error(model):
    """The error comes before any process is started, so there is no traceback of a scheduler."""
    code = (
        "import sys; from sglang.srt.entrypoints.engine import Engine;"
        "Engine(model_path=sys.argv[1], device='cpu', kv_backend='kvc', kvc_block_size=7)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, model], capture_output=True, text=True, timeout=300,
        env={**os.environ, "SGLANG_PLATFORM": "kvc_cpu"},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr[-2000:]
    assert done.stderr.count("Traceback") == 1, done.stderr[-2000:]
    last = [line for line in done.stderr.splitlines() if "ConfigError" in line][-1]
    assert last.startswith("sglang_kvc.errors.ConfigError: --kvc-block-size 7")
