"""Measured cells: every policy at every size. Invalid cells are refused with a reason.

A *cell* is one server configuration, named as in `common.kvc`: a format (`k4v4`), or a policy and its settings
(`snapkv+budget=4x+high=k4v4`). `stock` and `stock-fp8` are SGLang's own cache. An @ precedes the quality that each
request asks for (`k4v4@one-shot:8x`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

from bench import common
from bench.common import Score
from bench.quality import ruler
from bench.quality.intervals import paired
from bench.quality.tasks import TITLES
from kvc_kernels.formats import FORMATS
from sglang_kvc.cache.sizing import make_layout
from sglang_kvc.calibration.model_fingerprint import Identity
from sglang_kvc.errors import ConfigError
from sglang_kvc.options.resolve import resolve_config
from sglang_kvc.policies import SEQUENCE, make_policy
from sglang_kvc.policies.registry import POLICIES, PRESETS

STOCK, FP8 = "stock", "stock-fp8"
BUDGETS = ("4x", "8x", "2x")
# Presets that run first, because they are the most informative.
FIRST = ("ada-expected", "quota", "kv-compress", "snapkv", "h2o", "random", "streaming-llm", "pyramid", "minikv")
# Cells of the presets that docs/policies.md recommends.
RECOMMENDED = {"safe": "k8v4", "balanced": "k4v4", "max": "max", "fp8": FP8}
FIXED_FORMATS = ("minikv", "mikv")  # their formats are the method
THIN_CHUNK = 1024  # tokens of a chunk of a thinned prompt
LONG = 28_000  # tokens of a long context; both Qwen models support 32,768
FORMAT_CELLS = ("k8v8", "k4v2", "k2v2")


def names() -> list[str]:
    """Names of all cells, by importance. `refusal` rejects many of them."""
    presets = [p.name for p in PRESETS if p.name not in RECOMMENDED]
    presets = [n for n in FIRST if n in presets] + [n for n in presets if n not in FIRST]
    out = [*dict.fromkeys([STOCK, *RECOMMENDED.values()]), "bf16", *FORMAT_CELLS, "leankv", "arkv"]
    out += [_named(p, "4x", None) for p in presets] + ["mikv"]  # it drops no tokens, so few budgets are possible
    out += [_named(p, b, "k4v4") for b in ("4x", "8x") for p in presets]
    out += [_named(p, b, None) for b in ("8x", "2x") for p in presets]
    # The same format for all methods, for comparisons; then pruning combined with lower formats.
    out += [_named(p, b, "k8v8") for b in BUDGETS for p in presets]
    out += [_named(p, "8x", high) for high in ("k4v2", "k2v2") for p in presets]
    return list(dict.fromkeys(n for n in out if n))


def _named(policy: str, budget: str, high: str | None) -> str | None:
    if high and policy in FIXED_FORMATS:
        return None
    default = POLICIES[policy]().high
    return f"{policy}+budget={budget}" + (f"+high={high}" if high and high != default else "")


def scores(rows: dict[str, dict], model: str, first: int = 0, length: int = 0) -> dict[str, Score]:
    """Scores of the recommended presets and stock fp8: points gained or lost against stock in the same run with 95 %
    interval, KL, and bytes. `first`: number of the first context. Contexts of at least `LONG` tokens have separate
    names. Runs of RULER's tasks alone have no sum over tasks."""
    out: dict[str, Score] = {}
    quality = "quality.32k" if length >= LONG else "quality"
    for name, cell in RECOMMENDED.items():
        row = rows.get(cell, {})
        for task in TITLES:
            if "right_to_wrong" in row.get(task, {}):
                out[f"{quality}.{name}.{model}.{task}.delta"] = delta(row[task], chosen_on(cell, task, first))
        marks = [row[task] for task in TITLES if "right_to_wrong" in row.get(task, {})]
        if marks and not {task for task in TITLES if task in row} <= ruler.TASKS.keys():
            out[f"{quality}.{name}.{model}.all.delta"] = delta(combined(marks), f" of {len(marks)} tasks")
        if row.get("kl"):
            unit = "nats a token, from the 20 best candidates"
            out[f"{quality}.{name}.{model}.kl_p99"] = Score(row["kl"]["p99"], unit, REFERENCE)
        if row.get("ratio_body"):
            out[f"{quality}.{name}.{model}.ratio_body"] = Score(row["ratio_body"], "x smaller", PLAIN)
    return out


def one_shot_scores(rows: dict[str, dict], model: str) -> dict[str, Score]:
    """Points that requests at `one-shot` levels gain or lose against stock in the same run."""
    out: dict[str, Score] = {}
    for cell, row in rows.items():
        kind, _, rate = (split_level(cell)[1] or "").partition(":")
        for task in TITLES:
            if kind == "one-shot" and "right_to_wrong" in row.get(task, {}):
                out[f"papers.oneshot.{rate}.{model}.{task}.delta"] = delta(row[task])
    return out


PRUNED = "papers.leankv.pruned_share"


def calibrated_cell(names: Iterable[str], thresholds: dict) -> str | None:
    """The `leankv` cell with the thresholds and formats that `sglang-kvc calibrate --answers` chose, otherwise with the
    default settings; None if it is not among `names`."""
    default = POLICIES["leankv"]()
    for name in names:
        settings = common.kvc_settings(name) if name.split("+")[0] == "leankv" else {}
        fields = settings.keys() - {"policy"}
        values = {k: type(v)(settings.get(k, getattr(default, k))) for k, v in thresholds.items()}
        if settings and fields <= thresholds.keys() and values == thresholds:
            return name
    return None


def pruned_share(row: dict, cell: str) -> Score:
    """Share of tokens that the `leankv` cell with calibrated thresholds drops; 0 if it loses significantly in a
    task."""
    marks = [row[task] for task in TITLES if "right_to_wrong" in row.get(task, {})]
    lossless = marks and all((delta(m).high or 0.0) >= 0 for m in marks)
    unit = f"share of tokens dropped without a significant loss in a task, {cell}, thresholds calibrated by answers"
    return Score(1 - row["kept"] if lossless else 0.0, unit, REFERENCE)


PLAIN = "bf16 keys and values alone"
REFERENCE = "stock bf16 of the same run"
FLOOR = 0.05  # share of right answers of stock below which a task cannot show a loss


def chosen_on(cell: str, task: str, first: int) -> str:
    """Note for questions that the choice of a preset was based on: the dictionaries of the first contexts for `max`."""
    return " on which it was chosen" if (cell, task, first) == ("max", "kv", 0) else ""


def combined(tasks: list[dict]) -> dict:
    """Marks of several tasks, combined as those of one task."""
    of = sum(marks["of"] for marks in tasks)
    flips = {k: sum(marks[k] for marks in tasks) for k in ("right_to_wrong", "wrong_to_right")}
    return {"of": of, "em": sum(marks["em"] * marks["of"] for marks in tasks) / of, **flips}


def delta(marks: dict, note: str = "") -> Score:
    """Points gained or lost in one task against stock of the same run. `marks`: of `run.summary`. `note`: added to the
    unit."""
    gained, lost, of = marks["wrong_to_right"], marks["right_to_wrong"], marks["of"]
    stock_right = round(marks["em"] * of) - gained + lost
    floor = f", floor: stock has {stock_right} right" if stock_right < FLOOR * of else ""
    low, high = paired(gained, lost, of)
    unit = f"points of {of} questions{note}{floor}"
    return Score(100 * (gained - lost) / of, unit, REFERENCE, low=100 * low, high=100 * high)


def select(wanted: str) -> list[str]:
    """Names of cells from a comma-separated list, or `all`. The name of a policy selects all of its cells."""
    all_names = names()
    if wanted == "all":
        return all_names
    out: list[str] = []
    for name in wanted.split(","):
        of_policy = [n for n in all_names if n.split("+")[0] == name]
        out += of_policy if of_policy and name not in all_names else [name]
    return list(dict.fromkeys(out))


def split_level(name: str) -> tuple[str, str | None]:
    """Server of a cell, and the level that its requests ask for, or None."""
    server, _, level = name.partition("@")
    return server, level or None


def must_isolate_questions(name: str) -> bool:
    """Whether prompts must not share blocks, because the attention of a question decides which context tokens are
    kept."""
    server, level = split_level(name)
    if server in (STOCK, FP8) or level:
        return False  # requests at a level that depends on the question have private blocks
    settings = common.kvc_settings(server)
    policy = POLICIES[settings["policy"]]
    return policy(**{k: v for k, v in settings.items() if k in ("scorer", "share")}).scope == SEQUENCE


def needs_calibration(name: str) -> bool:
    name, _ = split_level(name)
    if name in (STOCK, FP8):
        return False
    settings = common.kvc_settings(name)
    fields = {k: v for k, v in settings.items() if k in ("scorer", "share")}
    policy = POLICIES.get(settings["policy"])
    return policy is not None and bool(policy(**fields).needs)


def refusal(name: str, identity: Identity, block: int, calibration: Path | None) -> str | None:
    """Why this cell is not measured, as a sentence, from the server's configuration; None if it is measured."""
    name, _ = split_level(name)
    if name in (STOCK, FP8):
        return None
    settings = common.kvc_settings(name)
    if needs_calibration(name):
        settings["calibration"] = str(calibration) if calibration else None
    options = SimpleNamespace(**{f"kvc_{k}": v for k, v in settings.items()}, kvc_block_size=block)
    try:
        config = resolve_config(options)
        policy = make_policy(config)
        shape = {"layers": identity.layers, "heads": identity.kv_heads, "head_dim": identity.head_dim}
        layout = make_layout(config, policy, **shape)
        policy.check(layout)
    except (ConfigError, ValueError) as e:
        return str(e)
    if config.budget and policy.high_pages(layout) == layout.block_pages(FORMATS[config.high]):
        return f"Nothing is dropped at {config.budget}: it would be {config.high} of every token."
    return None


def attempts(name: str, args, port: int) -> Iterator[list[str]]:
    """Options of the server, followed by fallbacks for a stock server that does not start, because it is the
    reference."""
    name, level = split_level(name)
    thins = level is not None and args.one_shot_tokens > 0
    # All other servers have equal memory, and share the device. Capturing CUDA graphs would take longer than the tasks.
    tokens = args.one_shot_tokens if thins else args.tokens
    common_options = ["--enable-fp32-lm-head", "--max-total-tokens", str(tokens), "--nccl-port", str(port + 1)]
    common_options += ["--skip-server-warmup"]
    gpu = args.device == "cuda"
    if gpu:
        common_options += ["--sampling-backend", "pytorch", "--grammar-backend", "none"]
        common_options += ["--mem-fraction-static", "0.85"]  # an upper bound; --max-total-tokens is lower
        common_options += ["--cuda-graph-backend-decode=disabled", "--cuda-graph-backend-prefill=disabled"]
    if gpu or thins:
        common_options += ["--chunked-prefill-size", str(THIN_CHUNK if thins else 8192)]
    if name not in (STOCK, FP8):
        if needs_calibration(name):
            common_options += ["--kvc-calibration", str(args.calibration)]
        yield common.kvc(name, *common_options, block=args.block, memory=None)
        return
    fp8 = ["--kv-cache-dtype", "fp8_e4m3"] if name == FP8 else []
    pages = ["--page-size", str(args.block)]
    if not gpu:
        yield common.stock(*pages, *fp8, *common_options)
        return
    for backend in dict.fromkeys((common.default_attention(), "flashinfer", "triton")):
        for page in (pages, []):
            yield common.stock("--attention-backend", backend, *page, *fp8, *common_options)
