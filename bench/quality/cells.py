"""The measured cells: every policy at every size, the most informative first, and the reasons why some are not
measured.

A *cell* is one server configuration. Its name is that of `common.kvc`: a format (`k4v4`), or a policy and its
settings (`snapkv+budget=4x+high=k4v4`); `stock` and `stock-fp8` are SGLang's own cache. An @ precedes the level that
each request asks for (`k4v4@one-shot:8x`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

from bench import common
from bench.common import Score
from bench.quality.intervals import paired
from bench.quality.tasks import TITLES
from kvc_kernels.layout import FORMATS
from sglang_kvc.cache.sizing import make_layout
from sglang_kvc.calibration.model_fingerprint import Identity
from sglang_kvc.errors import ConfigError
from sglang_kvc.options.resolve import resolve_config
from sglang_kvc.policies import SEQUENCE, make_policy
from sglang_kvc.policies.registry import POLICIES, PRESETS

STOCK, FP8 = "stock", "stock-fp8"
BUDGETS = ("4x", "8x", "2x")
# The most informative first; presets that are not in this list follow.
FIRST = ("ada-expected", "quota", "kv-compress", "snapkv", "h2o", "random", "streaming-llm", "pyramid", "minikv")
# The presets that docs/policies.md recommends, as cells.
RECOMMENDED = {"safe": "k8v4", "balanced": "k4v4", "max": "max", "fp8": FP8}
FIXED_FORMATS = ("minikv", "mikv")  # their formats are the method
LONG = 28_000  # tokens of a context; both Qwen models take 32,768
QUANTISED = ("k8v8", "k4v2", "k2v2")


def names() -> list[str]:
    """All cells, by importance. Many are refused: see `refusal`."""
    presets = [p.name for p in PRESETS if p.name not in RECOMMENDED]
    presets = [n for n in FIRST if n in presets] + [n for n in presets if n not in FIRST]
    out = [*dict.fromkeys([STOCK, *RECOMMENDED.values()]), "bf16", *QUANTISED, "leankv", "arkv"]
    out += [_named(p, "4x", None) for p in presets] + ["mikv"]  # drops nothing, and so meets few budgets
    out += [_named(p, b, "k4v4") for b in ("4x", "8x") for p in presets]
    out += [_named(p, b, None) for b in ("8x", "2x") for p in presets]
    # The same format for all methods, to compare them; and pruning combined with lower formats.
    out += [_named(p, b, "k8v8") for b in BUDGETS for p in presets]
    out += [_named(p, "8x", high) for high in ("k4v2", "k2v2") for p in presets]
    return list(dict.fromkeys(n for n in out if n))


def _named(policy: str, budget: str, high: str | None) -> str | None:
    if high and policy in FIXED_FORMATS:
        return None
    own = POLICIES[policy]().high
    return f"{policy}+budget={budget}" + (f"+high={high}" if high and high != own else "")


def scores(rows: dict[str, dict], model: str, first: int = 0, length: int = 0) -> dict[str, Score]:
    """The scoreboard's figures for the recommended presets and stock fp8: difference in points from stock in the same
    run, with its 95 % interval, KL, bytes. `first`: number of the first context. Contexts of `LONG` tokens or more have
    separate names."""
    out: dict[str, Score] = {}
    quality = "quality.32k" if length >= LONG else "quality"
    for name, cell in RECOMMENDED.items():
        row = rows.get(cell, {})
        for task in TITLES:
            if "right_to_wrong" in row.get(task, {}):
                out[f"{quality}.{name}.{model}.{task}.delta"] = lost(row[task], chosen_on(cell, task, first))
        asked = [row[task] for task in TITLES if "right_to_wrong" in row.get(task, {})]
        if asked:
            out[f"{quality}.{name}.{model}.all.delta"] = lost(together(asked), f" of {len(asked)} tasks")
        if row.get("kl"):
            unit = "nats a token, from the 20 best candidates"
            out[f"{quality}.{name}.{model}.kl_p99"] = Score(row["kl"]["p99"], unit, REFERENCE)
        if row.get("ratio_body"):
            out[f"{quality}.{name}.{model}.ratio_body"] = Score(row["ratio_body"], "x smaller", PLAIN)
    return out


def one_shot_scores(rows: dict[str, dict], model: str) -> dict[str, Score]:
    """Points that requests at `one-shot` levels lose against stock in the same run."""
    out: dict[str, Score] = {}
    for cell, row in rows.items():
        kind, _, rate = (served(cell)[1] or "").partition(":")
        for task in TITLES:
            if kind == "one-shot" and "right_to_wrong" in row.get(task, {}):
                out[f"papers.oneshot.{rate}.{model}.{task}.delta"] = lost(row[task])
    return out


PLAIN = "bf16 keys and values alone"
REFERENCE = "stock bf16 of the same run"
FLOOR = 0.05  # share of stock's right answers below which a task cannot show a loss


def chosen_on(cell: str, task: str, first: int) -> str:
    """Note on questions by which a preset was chosen: the dictionaries of the first contexts for `max`."""
    return " on which it was chosen" if (cell, task, first) == ("max", "kv", 0) else ""


def together(tasks: list[dict]) -> dict:
    """The marks of several tasks combined as one."""
    of = sum(marks["of"] for marks in tasks)
    flips = {k: sum(marks[k] for marks in tasks) for k in ("right_to_wrong", "wrong_to_right")}
    return {"of": of, "em": sum(marks["em"] * marks["of"] for marks in tasks) / of, **flips}


def lost(marks: dict, which: str = "") -> Score:
    """Points of one task against stock of the same run. `marks`: of `run.summary`; `which`: what its questions are."""
    won, gone, of = marks["wrong_to_right"], marks["right_to_wrong"], marks["of"]
    right = round(marks["em"] * of) - won + gone  # of stock
    floor = f", floor: stock has {right} right" if right < FLOOR * of else ""
    low, high = paired(won, gone, of)
    unit = f"points of {of} questions{which}{floor}"
    return Score(100 * (won - gone) / of, unit, REFERENCE, low=100 * low, high=100 * high)


def chosen(wanted: str) -> list[str]:
    """`all`, or names separated by commas; a policy's name stands for all of its cells."""
    everything = names()
    if wanted == "all":
        return everything
    out: list[str] = []
    for name in wanted.split(","):
        mine = [n for n in everything if n.split("+")[0] == name]
        out += mine if mine and name not in everything else [name]
    return list(dict.fromkeys(out))


def served(name: str) -> tuple[str, str | None]:
    """The server of a cell, and the level that its requests ask for, if any."""
    server, _, level = name.partition("@")
    return server, level or None


def keeps_questions_apart(name: str) -> bool:
    """Whether the attention of a prompt's question decides which context tokens are kept, so that prompts must not
    share blocks."""
    server, level = served(name)
    if server in (STOCK, FP8) or level:
        return False  # a level that reads the question has private blocks for each request
    settings = common.kvc_settings(server)
    policy = POLICIES[settings["policy"]]
    return policy(**{k: v for k, v in settings.items() if k in ("scorer", "share")}).scope == SEQUENCE


def needs_calibration(name: str) -> bool:
    name, _ = served(name)
    if name in (STOCK, FP8):
        return False
    settings = common.kvc_settings(name)
    fields = {k: v for k, v in settings.items() if k in ("scorer", "share")}
    policy = POLICIES.get(settings["policy"])
    return policy is not None and bool(policy(**fields).needs)


def refusal(name: str, identity: Identity, block: int, calibration: Path | None) -> str | None:
    """The reason, in a sentence, why this cell is not measured, from the server's own configuration; None if it is
    measured."""
    name, _ = served(name)
    if name in (STOCK, FP8):
        return None
    settings = common.kvc_settings(name)
    if needs_calibration(name):
        settings["calibration"] = str(calibration) if calibration else None
    given = SimpleNamespace(**{f"kvc_{k}": v for k, v in settings.items()}, kvc_block_size=block)
    try:
        config = resolve_config(given)
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
    """Options of the server, followed by fallbacks if it does not start, because the reference must exist."""
    name, _ = served(name)
    # Cells share the device. All have equal memory, and no CUDA graphs, because capture takes longer than the tasks.
    common_options = ["--enable-fp32-lm-head", "--max-total-tokens", str(args.tokens), "--nccl-port", str(port + 1)]
    common_options += ["--skip-server-warmup"]
    gpu = args.device == "cuda"
    if gpu:
        common_options += ["--sampling-backend", "pytorch", "--grammar-backend", "none"]
        common_options += ["--mem-fraction-static", "0.85"]  # no server takes this much: --max-total-tokens is lower
        common_options += ["--cuda-graph-backend-decode=disabled", "--cuda-graph-backend-prefill=disabled"]
        common_options += ["--chunked-prefill-size", "8192"]
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
