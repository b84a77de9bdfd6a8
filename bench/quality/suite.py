"""Tasks by name: contexts, length limit of answers, and check of answers."""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from bench.quality import chains, fetch, ruler
from bench.quality.calls import calls, same_call
from bench.quality.fewshot import shots
from bench.quality.humaneval import STOP, passes, solved
from bench.quality.records import records, same_value
from bench.quality.run import SCORED
from bench.quality.tasks import Context, Maker, names, right

NLL = "nll"  # likelihood task, which has passages instead of questions
DEFAULT = ("niah", "kv", NLL)


@dataclass(frozen=True)
class Task:
    make: Callable[[Maker, Any], list[Context]]  # (maker, command-line arguments) -> contexts
    right: Callable[[Any, str], bool] = right  # (expected answer, generated text) -> whether it is right
    tokens: int | None = None  # maximum length of an answer; None: --answer-tokens
    stop: tuple[str, ...] = field(default=())  # strings that end an answer; without any, it has the maximum length

    @property
    def free(self) -> bool:
        """Whether the model ends its answer, so that its length is meaningful."""
        return bool(self.stop)


def _numbered(make: Callable[[Maker, int, int], Context]) -> Callable[[Maker, Any], list[Context]]:
    return lambda maker, args: [make(maker, args.first + i, args.length) for i in range(args.contexts)]


def _chat(make: Callable[[Maker, int, int], Context]) -> Task:
    """The task without the beginning of its answers."""
    return Task(lambda maker, args: _numbered(make)(maker.as_chat(), args), names, tokens=30)


def _ruler(task: str) -> Callable[[Maker, Any], list[Context]]:
    """Contexts of a RULER task, eight times as many as for other tasks, because each has only one question. Several
    processes create them, because the generators are slow for long contexts."""

    def make(maker: Maker, args) -> list[Context]:
        numbers = range(8 * args.first, 8 * (args.first + args.contexts))
        create = functools.partial(ruler.context, maker, fetch.ruler(), task, tokens=args.length)
        workers = min(len(numbers), len(os.sched_getaffinity(0)))
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            return list(pool.map(create, numbers, chunksize=-(-len(numbers) // (4 * workers))))

    return make


def _chains(maker: Maker, args) -> list[Context]:
    return [chains.chains(maker, fetch.gsm8k(), args.first + i, args.length) for i in range(args.contexts)]


TASKS = {
    "niah": Task(_numbered(Maker.needles)),
    "kv": Task(_numbered(Maker.dictionary)),
    "niah-chat": _chat(Maker.needles),
    "kv-chat": _chat(Maker.dictionary),
    "fewshot": Task(_numbered(shots), tokens=3),
    "extract": Task(_numbered(records), same_value, tokens=6),
    "vt": Task(_ruler("vt"), ruler.names_all, tokens=30),
    "cwe": Task(_ruler("cwe"), ruler.names_most, tokens=60),
    "multikey": Task(_ruler("multikey"), ruler.names_all, tokens=45),
    "chains": Task(_chains, chains.concludes, 120, chains.STOP),
    "code": Task(
        lambda maker, args: solved(maker, args.data["human_eval"], args.problems, args.length), passes, 200, STOP
    ),
    "calls": Task(
        lambda maker, args: calls(maker, args.data["agents"], args.calls, 2 * args.length), same_call, 80, ("\n",)
    ),
}
FROM_DATA = ("code", "calls")  # tasks that need the data file
NAMES = ("niah", "kv", NLL, *(n for n in TASKS if n not in DEFAULT))


def select(names: str) -> list[str]:
    """Task names from a comma-separated list, in the order in which they run: cheap and informative tasks first."""
    wanted = names.split(",")
    if unknown := sorted(set(wanted) - set(NAMES)):
        raise ValueError(f"There is no task {', '.join(unknown)}; choose from {', '.join(NAMES)}.")
    return [n for n in NAMES if n in wanted]


@dataclass
class Workload:
    """Contexts and passages that all cells get."""

    contexts: dict[str, list[Context]]  # by task
    passages: list[list[int]]

    @classmethod
    def create(cls, maker: Maker, args) -> Workload:
        contexts = {n: TASKS[n].make(maker, args) for n in args.tasks if n in TASKS}
        count = args.contexts if NLL in args.tasks else 0
        return cls(contexts, [maker.passage(args.first + i, args.length + SCORED + 1) for i in range(count)])

    def sample(self) -> list[int]:
        """Token ids of one context of the measured length."""
        for contexts in self.contexts.values():
            return list(contexts[0].ids)
        return self.passages[0][: -SCORED - 1]

    def tokens(self, args) -> int:
        """Memory in tokens that the largest group of contexts of a task needs, with the concurrent questions."""
        sizes = [0]
        for name, contexts in self.contexts.items():
            longest = max(len(q.ask) for c in contexts for q in c.questions)
            request = longest + (TASKS[name].tokens or args.answer_tokens) + 2 * args.block
            most = max(resident((c.ids for c in group), 1) for group in groups(contexts, args))
            sizes.append(int(1.4 * most) + args.concurrency * request + 4096)
        return max(sizes)


def groups(contexts: list[Context], args) -> list[list[Context]]:
    """Contexts of a task in groups that are in the cache together, of at most `args.contexts` contexts."""
    return [contexts[i : i + args.contexts] for i in range(0, len(contexts), args.contexts)]


def resident(prefixes: Iterable, block: int) -> int:
    """Number of tokens in full blocks of all prefixes. Shared blocks count once."""
    digests = set()
    for ids in prefixes:
        digest = 0
        for begin in range(0, len(ids) // block * block, block):
            digest = hash((digest, tuple(ids[begin : begin + block])))
            digests.add(digest)
    return len(digests) * block
