"""Questions to the server of one cell.

Protocol `unseen`: contexts are sent first, and questions after their blocks are packed, so that a context is compressed
without its questions. Protocol `seen`: each question is one prompt with its context, as in the papers on pruning.
"""

from __future__ import annotations

import itertools
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

from bench import common
from bench.client import Answer
from bench.quality.cells import keeps_questions_apart, served
from bench.quality.run import SCORED
from bench.quality.suite import ASKED, NLL, Work, resident
from bench.quality.tasks import Context
from bench.serve.ratio import in_flight

SEEN, UNSEEN = PROTOCOLS = ("seen", "unseen")
TOP = 20  # number of compared candidates per scored token
SCORERS = 4  # answers scored at a time; each program of HumanEval takes a while
STATS = ("ratio", "ratio_body", "bytes_per_token", "bytes_per_token_body", "occupancy", "tier_shares", "tokens_by_tier")
Tops = list[list[dict[int, float]]]  # passage, token -> log-probabilities of the best candidates


class CellError(RuntimeError):
    """The server answers, but not as the measurement requires."""


def settle(server: common.Server, full_tokens: int, seconds: float = 20) -> dict:
    """The cache's statistics after they have settled, with the share of full blocks that are packed."""
    last, until = server.client.stats(), time.monotonic() + seconds
    while last and time.monotonic() < until:
        time.sleep(0.1)
        now = server.client.stats()
        if now == last:
            break
        last = now
    return {k: last[k] for k in STATS} | {"packed": last["packed_tokens"] / full_tokens} if last else {}


def load(server: common.Server, prefixes: list, block: int) -> dict:
    """Send all prefixes one after the other, so that a policy's collected attention does not depend on other
    requests."""
    server.client.flush()
    for ids in prefixes:
        server.client.generate(ids, 1)
    return settle(server, resident(prefixes, block))


def ask(
    server: common.Server, cell: str, name: str, contexts: list[Context], args
) -> tuple[list[list[bool]], list, dict]:
    """Ask all questions about all contexts. Returns, by context, whether each answer is right and its number of tokens,
    and the statistics before the questions (protocol `seen`: None)."""
    task, (_, level), seen = ASKED[name], served(cell), args.protocol == SEEN
    account = {} if seen else load(server, [c.ids for c in contexts], args.block)
    asked = [(c, q) for c in contexts for q in c.questions]
    sampling: dict = {"stop": list(task.stop)} if task.free else {}
    sampling |= {"custom_params": {"kvc": level}} if level else {}
    options = {"ignore_eos": not task.free, "sampling": sampling}
    apart, numbers = seen and keeps_questions_apart(cell), itertools.count()

    def one(pair) -> Answer:
        context, question = pair
        tokens = task.tokens or args.answer_tokens
        alone = {"extra_key": f"{cell}-{name}-{next(numbers)}"} if apart else {}
        answer = server.client.generate([*context.ids, *question.ask], tokens, **options, **alone)
        hit = len(context.ids) // args.block * args.block
        if answer.cached_tokens < hit and not seen:
            raise CellError(f"{context.name}: {answer.cached_tokens} tokens cached, not {hit}")
        return answer

    with ThreadPoolExecutor(args.concurrency) as pool:
        answers = list(pool.map(one, asked))
    # After all answers, because some tasks run programs, which would slow the server on a small machine.
    with ThreadPoolExecutor(SCORERS) as pool:
        marks = iter(list(pool.map(lambda pair, answer: task.right(pair[1].answer, answer.text), asked, answers)))
    lengths = iter([len(a.ids) for a in answers])
    return _as(contexts, marks), _as(contexts, lengths), account


def _as(contexts: list[Context], values) -> list[list]:
    return [[next(values) for _ in c.questions] for c in contexts]


def likelihood(server: common.Server, passages: list[list[int]], block: int) -> tuple[list[float], Tops, dict]:
    """Nats per token of the ends of all passages, their best candidates, and the statistics (see `run.likelihood`)."""
    begin = len(passages[0]) - SCORED - 1
    account = load(server, [p[:begin] for p in passages], block)
    nats, tops = [], []
    for ids in passages:
        answer = server.client.generate(ids, 1, input_from=begin, top=TOP)
        if not begin // block * block - block <= answer.cached_tokens <= begin or not answer.cached_tokens:
            raise CellError(f"likelihood: {answer.cached_tokens} tokens cached before {begin}")
        if not len(answer.input_logprobs) == len(answer.input_top) == SCORED:
            raise CellError(f"likelihood: {len(answer.input_logprobs)}, {len(answer.input_top)} positions")
        nats.append(-statistics.fmean(answer.input_logprobs))
        tops.append(answer.input_top)
    return nats, tops, account


def measure(server: common.Server, cell: str, work: Work, args, out: dict) -> Tops:
    """Fill `out` as results arrive, so that an interrupted cell keeps them; returns the best candidates."""
    out["accounts"], tops = {}, []
    for name in args.tasks:
        if name == NLL:
            out[NLL], tops, out["accounts"][NLL] = likelihood(server, work.passages, args.block)
            continue
        out[name], lengths, out["accounts"][name] = ask(server, cell, name, work.contexts[name], args)
        if ASKED[name].free:
            out.setdefault("lengths", {})[name] = lengths
    if server.client.stats():
        server.client.flush()
        running = in_flight(server, work.sample(), served(cell)[1])
        out["accounts"]["running"] = {k: running[k] for k in STATS}
    return tops
