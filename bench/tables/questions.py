"""Tables of questions to models: presets, one-shot prompts, long contexts."""

from __future__ import annotations

from bench.quality.tasks import TITLES as QUESTIONS

from .text import lines, points_lost, sha, short, titled

PRESETS = {"safe": "`safe` (k8v4)", "balanced": "`balanced` (k4v4)", "max": "`max`", "fp8": "stock fp8"}
MODELS = {"smollm2": "SmolLM2-135M", "qwen-0.5b": "Qwen2.5-Coder-0.5B", "qwen-1.5b": "Qwen2.5-Coder-1.5B"}
QUALITY_NOTE = """Each cell is the change in correct answers against stock SGLang in bf16 of the same run, in points.
Contexts have 2048 tokens. A task has 104 questions (HumanEval 164, tool calls 100).

* Brackets hold 95% intervals (Tango's score interval for independent questions; eight questions share a context). An
  interval that contains 0 shows no difference.
* *floor* means that stock answers fewer than one question in twenty.
* `*` means that the preset was chosen on these questions.
* KL p99 is in nats per token. Each cell is one greedy run.
* The weights are dequantized from third-party 4-bit GGUF files ([models](quality.md#models))."""
ONE_SHOT_NOTE = """Prompts have 2048 tokens, contain their question, and were sent with `"kvc": "one-shot:8x"` and so
on. Each cell is the change in correct answers of 104 against stock SGLang in bf16 of the same run, in points. The ratio
is that of full packed blocks. A whole request is [compressed less](quality.md#one-shot-prompts). The constants of the
ranking were chosen without these needles and dictionary entries. That page also has the other questions, where the 0.5B
model loses more of the dictionary at 64x."""
LONG_NOTE = """Contexts have 30,000 tokens, and the question comes after them. Each cell is the change in right answers
of 104 against stock SGLang in bf16 of the same run, in points. KL is in nats per token."""


def presets(board: dict[str, dict]) -> tuple[list[str], set[str]]:
    """Table of the points of presets against bf16 with one row per model and preset, and the names of its figures."""
    columns = {"ratio_body": "compression"}
    columns |= {"all.delta": "all tasks"} | {f"{task}.delta": name for task, name in QUESTIONS.items()}
    columns |= {"kl_p99": "KL p99"}
    prefixes = tuple(f"quality.{preset}." for preset in PRESETS)
    tasks = {n.rsplit(".", 2)[1] for n in board if n.startswith(prefixes) and n.endswith(".delta")}
    columns = {c: title for c, title in columns.items() if not c.endswith(".delta") or c.split(".")[0] in tasks}
    used = {n for p in PRESETS for m in MODELS for c in columns if (n := f"quality.{p}.{m}.{c}") in board}
    rows = []
    for model, title in MODELS.items():
        for preset, name in PRESETS.items():
            row = _row([title, name], [board.get(f"quality.{preset}.{model}.{c}") for c in columns])
            rows, title = rows + row, "" if row else title
    if not rows:
        return [], used
    text = [QUALITY_NOTE, "", *lines(["model", "preset", *columns.values(), "measured"], rows)]
    sizes = {f"quality.{p}.{r}" for p in PRESETS for r in ("ratio_body", "ratio_4k")} & set(board)
    return titled("Answer quality", text), used | sizes


def one_shot(board: dict[str, dict]) -> tuple[list[str], set[str]]:
    """Table of the points of one-shot prompts with one row per model and task, and one column per ratio."""
    names = {n: n.split(".") for n in board if n.startswith("papers.oneshot.")}  # papers.oneshot.8x.qwen-0.5b.kv.delta
    ratios = sorted({parts[2] for parts in names.values()}, key=lambda ratio: float(ratio[:-1]))
    rows = []
    for model, title in MODELS.items():
        for task, question in QUESTIONS.items():
            row_names = [f"papers.oneshot.{ratio}.{model}.{task}.delta" for ratio in ratios]
            rows += _row([title, question], [board.get(name) for name in row_names])
    if not rows:
        return [], set()
    head = ["model", "task", *ratios, "measured"]
    return titled("One-shot prompts", [ONE_SHOT_NOTE, "", *lines(head, rows)]), {*names}


def long_contexts(board: dict[str, dict]) -> tuple[list[str], set[str]]:
    """Table of the points of presets in long contexts with one row per model and preset."""
    columns = {"ratio_body": "compression", **{f"{t}.delta": q for t, q in QUESTIONS.items()}, "kl_p99": "KL p99"}
    names = {n for n in board if n.startswith("quality.32k.")}
    columns = {c: title for c, title in columns.items() if any(n.endswith(f".{c}") for n in names)}
    rows = []
    for model, title in MODELS.items():
        for preset, name in PRESETS.items():
            rows += _row([title, name], [board.get(f"quality.32k.{preset}.{model}.{c}") for c in columns])
    if not rows:
        return [], set()
    head = ["model", "preset", *columns.values(), "measured"]
    return titled("Long contexts", [LONG_NOTE, "", *lines(head, rows)]), names


def _row(labels: list[str], figures: list[dict | None]) -> list[list[str]]:
    """Row of `figures`, with the devices and commits of its points; no row if all figures are missing."""
    if not any(figures):
        return []
    points = [f for f in figures if f and "low" in f] or [f for f in figures if f]
    origins = dict.fromkeys(f"{short(f['device'])}, {sha(f['commit'])}" for f in points)
    return [[*labels, *(points_lost(f) if f else "" for f in figures), "; ".join(origins)]]
