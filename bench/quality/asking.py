"""Requests to the server of one cell.

Protocol `unseen`: a group of contexts is sent first, and its questions after all blocks are packed. A context is
therefore compressed without its questions. Protocol `seen`: context and question are one prompt, as in papers on
pruning.
"""

from __future__ import annotations

import itertools
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

from bench import common
from bench.client import Answer
from bench.quality.cells import must_isolate_questions, split_level
from bench.quality.run import SCORED
from bench.quality.suite import NLL, TASKS, Workload, groups, resident
from bench.quality.tasks import Context
from bench.serve.ratio import in_flight

SEEN, UNSEEN = PROTOCOLS = ("seen", "unseen")
TOP = 20  # number of compared candidates per scored token
SCORERS = 4  # concurrent checks of answers; each HumanEval program takes a while
STATS = ("ratio", "ratio_body", "bytes_per_token", "bytes_per_token_body", "occupancy", "tier_shares", "tokens_by_tier")
Tops = list[list[dict[int, float]]]  # passage, token -> log-probabilities of the best candidates


class CellError(RuntimeError):
    """An answer does not meet a condition of the benchmark."""


def settle(server: common.Server, full_tokens: int, seconds: float = 20) -> dict:
    """Statistics of the cache once they no longer change, with the share of full blocks that are packed."""
    last, until = server.client.stats(), time.monotonic() + seconds
    while last and time.monotonic() < until:
        time.sleep(0.1)
        now = server.client.stats()
        if now == last:
            break
        last = now
    return {k: last[k] for k in STATS} | {"packed": last["packed_tokens"] / full_tokens} if last else {}


def load(server: common.Server, prefixes: list, block: int) -> dict:
    """Send all prefixes one by one, so that the attention that a policy collects does not depend on other requests;
    return the statistics."""
    server.client.flush()
    for ids in prefixes:
        server.client.generate(ids, 1)
    return settle(server, resident(prefixes, block))


def ask(
    server: common.Server, cell: str, name: str, contexts: list[Context], args
) -> tuple[list[list[bool]], list, dict]:
    """Ask all questions about all contexts. Returns by context whether each answer is right, and its number of tokens;
    also the statistics before the questions of the first group (empty in protocol `seen`)."""
    task, (_, level), seen = TASKS[name], split_level(cell), args.protocol == SEEN
    sampling: dict = {"stop": list(task.stop)} if task.free else {}
    sampling |= {"custom_params": {"kvc": level}} if level else {}
    options = {"ignore_eos": not task.free, "sampling": sampling}
    isolated, numbers = seen and must_isolate_questions(cell), itertools.count()

    def answer_to(pair) -> Answer:
        context, question = pair
        tokens = task.tokens or args.answer_tokens
        namespace = {"extra_key": f"{cell}-{name}-{next(numbers)}"} if isolated else {}
        answer = server.client.generate([*context.ids, *question.ask], tokens, **options, **namespace)
        hit = len(context.ids) // args.block * args.block
        if answer.cached_tokens < hit and not seen:
            raise CellError(f"{context.name}: {answer.cached_tokens} tokens cached, not {hit}")
        return answer

    account, pairs, answers = {}, [(c, q) for c in contexts for q in c.questions], []
    for group in [contexts] if seen else groups(contexts, args):
        loaded = {} if seen else load(server, [c.ids for c in group], args.block)
        account = account or loaded
        with ThreadPoolExecutor(args.concurrency) as pool:
            answers += pool.map(answer_to, [(c, q) for c in group for q in c.questions])
    # Checked after all answers, because some tasks run programs that would slow down the server.
    with ThreadPoolExecutor(SCORERS) as pool:
        marks = list(pool.map(lambda pair, answer: task.right(pair[1].answer, answer.text), pairs, answers))
    return _by_context(contexts, marks), _by_context(contexts, [len(a.ids) for a in answers]), account


def _by_context(contexts: list[Context], values: list) -> list[list]:
    remaining = iter(values)
    return [[next(remaining) for _ in c.questions] for c in contexts]


def likelihood(server: common.Server, passages: list[list[int]], block: int) -> tuple[list[float], Tops, dict]:
    """Nats per token of the end of each passage, the best candidates, and the statistics (see `run.likelihood`)."""
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


def measure(server: common.Server, cell: str, workload: Workload, args, out: dict) -> Tops:
    """Run all tasks and return the best candidates. Results are added to `out` as they arrive, so that an interrupted
    cell keeps them."""
    out["accounts"], tops = {}, []
    for name in args.tasks:
        if name == NLL:
            out[NLL], tops, out["accounts"][NLL] = likelihood(server, workload.passages, args.block)
            continue
        out[name], lengths, out["accounts"][name] = ask(server, cell, name, workload.contexts[name], args)
        if TASKS[name].free:
            out.setdefault("lengths", {})[name] = lengths
    if server.client.stats():
        server.client.flush()
        running = in_flight(server, workload.sample(), split_level(cell)[1])
        out["accounts"]["running"] = {k: running[k] for k in STATS}
    return tops
