"""Three tasks of RULER (arXiv 2404.06654) from the unmodified generators of the lm-eval package.

`python -m bench.quality.fetch ruler` unpacks the generators to the cache folder. Each context has a seed. Stand-ins
replace unneeded imports: the rest of lm-eval, datasets, and nltk, which splits essays into sentences.

RULER's text is split where the question starts. Context and question use the model's chat template, followed by
RULER's start of the answer. Each context has one question.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import importlib.metadata
import io
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

from bench.quality.tasks import Context, Maker, Question

PACKAGE = "lm_eval.tasks.ruler"
MIN_TOKENS = 1000  # of a context; the generators do not return if a sample cannot fit
MIN_SHARE = 0.7  # of the common words that an answer must name
NEEDLE = "One of the special magic {type_needle_v} for {key} is: {value}."  # the haystack has only needles
Sample = tuple[str, str, str, list[str]]  # context, question, start of the answer, strings that an answer must contain


@functools.cache
def generators(folder: Path) -> SimpleNamespace:
    """Modules of the package, from the folder that `fetch.ruler` creates."""
    from transformers import AutoTokenizer  # noqa: F401  # before the stand-ins, whose versions it would look up

    stand_ins = {n: ModuleType(n) for n in ("lm_eval", "lm_eval.tasks", PACKAGE, "nltk", "datasets")}
    installed = {n: sys.modules[n] for n in stand_ins if n in sys.modules}
    for name, module in stand_ins.items():
        module.__path__ = [str(folder.joinpath(*name.split(".")))]  # submodules without the packages' __init__
    stand_ins["nltk"].data = SimpleNamespace(find=lambda resource: resource)
    stand_ins["nltk"].sent_tokenize = None
    version = importlib.metadata.version
    sys.modules.update(stand_ins)
    try:
        with (
            mock.patch("importlib.metadata.version", lambda name: "3.9.1" if name == "nltk" else version(name)),
            mock.patch.object(sys, "path", [*sys.path, str(folder)]),
        ):
            modules = {"vt": "vt_utils", "cwe": "cwe_utils", "niah": "prepare_niah", "templates": "niah_utils"}
            return SimpleNamespace(**{k: importlib.import_module(f"{PACKAGE}.{n}") for k, n in modules.items()})
    finally:
        for name in [n for n in sys.modules if n in stand_ins or n.startswith(PACKAGE)]:
            del sys.modules[name]  # later imports must not find the stand-ins
        sys.modules.update(installed)


@contextlib.contextmanager
def _seeded(*seed) -> Iterator[None]:
    """Seed the global random state for the generators, hide their output, and restore the state afterwards."""
    import numpy as np

    before, before_np = random.getstate(), np.random.get_state()
    rng = random.Random(repr(seed))
    random.seed(rng.random())
    np.random.seed(rng.randrange(1 << 32))
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        random.setstate(before)
        np.random.set_state(before_np)


def variables(modules: SimpleNamespace, tok, tokens: int) -> Sample:
    """Variable tracking: a chain of assignments among repeated sentences, after an example. The answer names all
    variables with one value."""
    example = modules.vt.sys_vartrack_w_noise_random(tok, 1, 500, incremental=5)[0]
    step = max(2, tokens // 1000)  # sentences; the generator tries each length in turn
    sample = modules.vt.sys_vartrack_w_noise_random(tok, 1, tokens + 30, incremental=step, icl_example=example)[0]
    return _cut(sample["input"], "\nQuestion: ", sample)


def common_words(modules: SimpleNamespace, tok, tokens: int) -> Sample:
    """Common words: a list in which ten words are more frequent. The answer names the ten. There is no example before
    the list, as in lm-eval but unlike RULER, because small models answer with the words of the example."""

    def sample(words: int) -> dict:
        _, text, common = modules.cwe.generate_input_output(words, tokens)
        prefix = modules.cwe.CONFIG["answer_prefix"]
        text = text.removesuffix(prefix)
        return {"input": text, "outputs": common, "gen_prefix": prefix.strip(), "length": len(tok(text).input_ids)}

    modules.cwe.RNG.seed(random.random())
    words = range(10, len(modules.cwe.WORDS))
    count = bisect.bisect_right(words, tokens, key=lambda n: sample(n)["length"]) + words[0]
    while (fitting := sample(count))["length"] > tokens:
        count -= 1
    return _cut(fitting["input"], "\nQuestion: ", fitting)


def keys(modules: SimpleNamespace, tok, tokens: int) -> Sample:
    """Keys: needles that fill the context (RULER's niah_multikey_3). The answer is the value of one key; both are
    UUIDs."""
    options = {"type_haystack": "needle", "type_needle_k": "uuids", "type_needle_v": "uuids"}
    options |= {"template": modules.templates.TEMPLATE, "num_samples": 1}
    for room in range(600, 0, -100):  # sizes increase in steps of five needles, so larger ones are tried first
        sample = modules.niah.generate_samples(NEEDLE, tok, max_seq_length=tokens + room, **options)[0]
        cut = _cut(sample["input"], "\nWhat is ", sample)
        if len(tok(cut[0]).input_ids) <= tokens:
            return cut
    raise ValueError(f"RULER's needles do not fit into {tokens} tokens; give a larger --length.")


def _cut(text: str, at: str, sample: dict) -> Sample:
    before, question = text[: text.rindex(at)], text[text.rindex(at) :]
    return before, question.rstrip(), sample["gen_prefix"], sample["outputs"]


TASKS: dict[str, Callable[[SimpleNamespace, Callable, int], Sample]] = {
    "vt": variables,
    "cwe": common_words,
    "multikey": keys,
}


def context(maker: Maker, folder: Path, task: str, number: int, tokens: int) -> Context:
    """Context of at most `tokens` tokens with one question."""
    if tokens < MIN_TOKENS:
        raise ValueError(f"{tokens} tokens have no room for RULER's tasks; give --length {MIN_TOKENS} or more.")
    modules = generators(folder)
    room = tokens - len(maker.ids(maker.head)) - 2  # 2, because tokens may differ at the boundary
    with _seeded(task, number):
        text, ask, begin, wanted = TASKS[task](modules, maker.tok, room)
    question = Question(tuple(maker.ids(f"{ask}{maker.tail}{begin}")), tuple(wanted))
    return Context(f"{task}-{number}", tuple(maker.ids(f"{maker.head}{text}")), (question,))


def names_all(wanted: tuple[str, ...], text: str) -> bool:
    """Whether the text contains all strings, which is a full score in RULER."""
    return share_named(wanted, text) == 1


def names_most(wanted: tuple[str, ...], text: str) -> bool:
    """Whether the text contains seven of ten strings, because small models rarely name all."""
    return share_named(wanted, text) >= MIN_SHARE


def share_named(wanted: tuple[str, ...], text: str) -> float:
    """RULER's score of one answer."""
    return sum(word.lower() in text.lower() for word in wanted) / len(wanted)
