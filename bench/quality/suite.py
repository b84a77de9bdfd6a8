"""All tasks by name: their contexts, the length limit of answers, and the check for right answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from bench.quality import fetch, ruler
from bench.quality.calls import calls, same_call
from bench.quality.fewshot import shots
from bench.quality.humaneval import STOP, passes, solved
from bench.quality.records import records, same_value
from bench.quality.run import SCORED
from bench.quality.tasks import Context, Maker, right

NLL = "nll"  # likelihood: passages instead of questions
DEFAULT = ("niah", "kv", NLL)


@dataclass(frozen=True)
class Task:
    make: Callable[[Maker, Any], list[Context]]  # of a maker and the command's arguments
    right: Callable[[Any, str], bool] = right  # of a question's answer and the text that was generated
    tokens: int | None = None  # of an answer at most; None: --answer-tokens
    stop: tuple[str, ...] = field(default=())  # what ends an answer; with none it is as long as it may be

    @property
    def free(self) -> bool:
        """Whether the model ends its answer itself, so that the answer's length is meaningful."""
        return bool(self.stop)


def _each(make: Callable[[Maker, int, int], Context]) -> Callable[[Maker, Any], list[Context]]:
    return lambda maker, args: [make(maker, args.first + i, args.length) for i in range(args.contexts)]


def _ruler(task: str) -> Callable[[Maker, Any], list[Context]]:
    """Eight contexts for each of other tasks, because RULER asks one question about a context."""

    def make(maker: Maker, args) -> list[Context]:
        numbers = range(8 * args.first, 8 * (args.first + args.contexts))
        return [ruler.context(maker, fetch.ruler(), task, i, args.length) for i in numbers]

    return make


ASKED = {
    "niah": Task(_each(Maker.needles)),
    "kv": Task(_each(Maker.dictionary)),
    "fewshot": Task(_each(shots), tokens=3),
    "extract": Task(_each(records), same_value, tokens=6),
    "vt": Task(_ruler("vt"), ruler.names_all, tokens=30),
    "cwe": Task(_ruler("cwe"), ruler.names_most, tokens=60),
    "multikey": Task(_ruler("multikey"), ruler.names_all, tokens=45),
    "code": Task(
        lambda maker, args: solved(maker, args.data["human_eval"], args.problems, args.length), passes, 200, STOP
    ),
    "calls": Task(
        lambda maker, args: calls(maker, args.data["agents"], args.calls, 2 * args.length), same_call, 80, ("\n",)
    ),
}
CARRIED = ("code", "calls")  # made of the data file
NAMES = ("niah", "kv", NLL, *(n for n in ASKED if n not in DEFAULT))


def chosen(names: str) -> list[str]:
    """The tasks named in a list separated by commas, in order of measurement: cheap and informative tasks first."""
    wanted = names.split(",")
    if unknown := sorted(set(wanted) - set(NAMES)):
        raise ValueError(f"There is no task {', '.join(unknown)}; there are {', '.join(NAMES)}.")
    return [n for n in NAMES if n in wanted]


@dataclass
class Work:
    """The questions to every cell, created once."""

    contexts: dict[str, list[Context]]  # of each task with questions
    passages: list[list[int]]

    @classmethod
    def of(cls, maker: Maker, args) -> Work:
        made = {n: ASKED[n].make(maker, args) for n in args.tasks if n in ASKED}
        count = args.contexts if NLL in args.tasks else 0
        return cls(made, [maker.passage(args.first + i, args.length + SCORED + 1) for i in range(count)])

    def sample(self) -> list[int]:
        """A context of the measured length."""
        made = [list(contexts[0].ids) for contexts in self.contexts.values()]
        return made[0] if made else self.passages[0][: -SCORED - 1]

    def tokens(self, args) -> int:
        """Tokens of memory that the largest task takes: its contexts once, and the concurrent questions."""
        need = [0]
        for name, contexts in self.contexts.items():
            longest = max(len(q.ask) for c in contexts for q in c.questions)
            asked = longest + (ASKED[name].tokens or args.answer_tokens) + 2 * args.block
            need.append(int(1.4 * resident((c.ids for c in contexts), 1)) + args.concurrency * asked + 4096)
        return max(need)


def resident(prefixes: Iterable, block: int) -> int:
    """Tokens in full blocks of all prefixes; shared beginnings count once."""
    ends = set()
    for ids in prefixes:
        digest = 0
        for begin in range(0, len(ids) // block * block, block):
            digest = hash((digest, tuple(ids[begin : begin + block])))
            ends.add(digest)
    return len(ends) * block
