"""Three of RULER's tasks (arXiv 2404.06654) from the unmodified generators of the lm-eval package.

`python -m bench.quality.fetch ruler` unpacks the generators into the cache folder. They run unchanged, with a seed for
each context. Stand-ins replace imports that are not needed here: the rest of lm-eval, datasets, and nltk, which splits
essays into sentences.

RULER's text is split into context and question at the beginning of the question. Both are in the model's chat template,
followed by RULER's beginning of the answer. Each context has one question.
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
LEAST = 1000  # tokens of a context; the generators do not return where a sample cannot fit
MOST = 0.7  # of the common words
NEEDLE = "One of the special magic {type_needle_v} for {key} is: {value}."  # the haystack is needles alone
Sample = tuple[str, str, str, list[str]]  # context, question, beginning of the answer, what an answer names


@functools.cache
def generators(folder: Path) -> SimpleNamespace:
    """The package's modules, from the folder that `fetch.ruler` makes."""
    from transformers import AutoTokenizer  # noqa: F401  # before the stand-ins, for whose versions it would ask

    stand_ins = {n: ModuleType(n) for n in ("lm_eval", "lm_eval.tasks", PACKAGE, "nltk", "datasets")}
    installed = {n: sys.modules[n] for n in stand_ins if n in sys.modules}
    for name, module in stand_ins.items():
        module.__path__ = [str(folder.joinpath(*name.split(".")))]  # without the code of the packages themselves
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
            del sys.modules[name]  # nothing else may take them for the packages
        sys.modules.update(installed)


@contextlib.contextmanager
def _seeded(*seed) -> Iterator[None]:
    """Context that hides the generators' prints and restores the global random state, from which they draw."""
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


def variables(made: SimpleNamespace, tok, tokens: int) -> Sample:
    """A chain of assignments among repeated sentences, behind an example: name all variables of one value."""
    example = made.vt.sys_vartrack_w_noise_random(tok, 1, 500, incremental=5)[0]
    sample = made.vt.sys_vartrack_w_noise_random(tok, 1, tokens + 30, incremental=2, icl_example=example)[0]
    return _cut(sample["input"], "\nQuestion: ", sample)


def common_words(made: SimpleNamespace, tok, tokens: int) -> Sample:
    """A list of words, ten of which come more often: name the ten. Without the example that RULER has before the list
    and lm-eval leaves out: small models answer with the example's words."""

    def sample(words: int) -> dict:
        _, text, common = made.cwe.generate_input_output(words, tokens)
        text, prefix = text.removesuffix(made.cwe.CONFIG["answer_prefix"]), made.cwe.CONFIG["answer_prefix"].strip()
        return {"input": text, "outputs": common, "gen_prefix": prefix, "length": len(tok(text).input_ids)}

    made.cwe.RNG.seed(random.random())
    words = range(10, len(made.cwe.WORDS))
    count = bisect.bisect_right(words, tokens, key=lambda n: sample(n)["length"]) + words[0]
    while (found := sample(count))["length"] > tokens:
        count -= 1
    return _cut(found["input"], "\nQuestion: ", found)


def keys(made: SimpleNamespace, tok, tokens: int) -> Sample:
    """Needles that fill the context (RULER's niah_multikey_3): the identifier that belongs to one identifier."""
    kinds = {"type_haystack": "needle", "type_needle_k": "uuids", "type_needle_v": "uuids"}
    more = {"template": made.templates.TEMPLATE, "num_samples": 1}
    for room in range(600, 0, -100):  # sizes go up in steps of five needles, so try larger ones first
        sample = made.niah.generate_samples(NEEDLE, tok, max_seq_length=tokens + room, **kinds, **more)[0]
        cut = _cut(sample["input"], "\nWhat is ", sample)
        if len(tok(cut[0]).input_ids) <= tokens:
            return cut
    raise ValueError(f"No needles of RULER fit into {tokens} tokens; give a larger --length.")


def _cut(text: str, at: str, sample: dict) -> Sample:
    before, question = text[: text.rindex(at)], text[text.rindex(at) :]
    return before, question.rstrip(), sample["gen_prefix"], sample["outputs"]


TASKS: dict[str, Callable[[SimpleNamespace, Callable, int], Sample]] = {
    "vt": variables,
    "cwe": common_words,
    "multikey": keys,
}


def context(maker: Maker, folder: Path, task: str, number: int, tokens: int) -> Context:
    """A context of at most `tokens` tokens and its question."""
    if tokens < LEAST:
        raise ValueError(f"Contexts of {tokens} tokens have no room for RULER's tasks; give --length {LEAST} or more.")
    made = generators(folder)
    room = tokens - len(maker.ids(maker.head)) - 2  # two, because tokens may differ at the boundary
    with _seeded(task, number):
        text, ask, begin, wanted = TASKS[task](made, maker.tok, room)
    question = Question(tuple(maker.ids(f"{ask}{maker.tail}{begin}")), tuple(wanted))
    return Context(f"{task}-{number}", tuple(maker.ids(f"{maker.head}{text}")), (question,))


def names_all(wanted: tuple[str, ...], text: str) -> bool:
    """Whether the text contains every wanted string, which gives the full score in RULER."""
    return share_named(wanted, text) == 1


def names_most(wanted: tuple[str, ...], text: str) -> bool:
    """Whether it contains seven of ten, because small models seldom name all."""
    return share_named(wanted, text) >= MOST


def share_named(wanted: tuple[str, ...], text: str) -> float:
    """RULER's score of one answer."""
    return sum(word.lower() in text.lower() for word in wanted) / len(wanted)
