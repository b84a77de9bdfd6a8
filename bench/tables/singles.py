"""Figures that stand alone."""

from __future__ import annotations

import re

from .questions import MODELS
from .text import ALIKE, CARDS, KEYED, keyed_on, lines, sha, short, spread, titled, worded

SPEED = {
    "Throughput": {
        "e2e.vs_bf16": "output tokens/s vs. stock bf16, equal KV memory, 64 x (4096 in + 512 out)",
        "e2e.vs_fp8": "output tokens/s vs. stock fp8, same load and memory",
        "e2e.unconstrained_vs_bf16": "output tokens/s vs. stock bf16, ample KV memory, worst of the loads below",
        "e2e.unconstrained_vs_bf16_c1": "output tokens/s vs. stock bf16, ample KV memory, 1 session",
        "e2e.unconstrained_vs_bf16_c8": "output tokens/s vs. stock bf16, ample KV memory, 8 sessions",
        "e2e.unconstrained_vs_bf16_c64": "output tokens/s vs. stock bf16, ample KV memory, 64 sessions",
    },
    "Time to first token": {
        "e2e.ttft_vs_fp8": "median TTFT vs. stock fp8, equal KV memory, 64 x (4096 in + 512 out)",
        "e2e.first_token.computed_vs_bf16": "TTFT, cold prompt, length that needs no padding",
        "e2e.first_token.computed_at_once_vs_bf16": "TTFT, cold prompt right behind another request",
        "e2e.first_token.computed_padded_vs_bf16": "TTFT, cold prompt that stock pads to a CUDA graph",
        "e2e.first_token.computed_padded_at_once_vs_bf16": "TTFT, padded cold prompt behind another request",
        "e2e.first_token.cached_vs_bf16": "TTFT, cached prompt after a pause",
        "e2e.first_token.cached_at_once_vs_bf16": "TTFT, cached prompt at once",
        "e2e.first_token.appended_vs_bf16": "TTFT, 124 tokens appended to a cached prompt after a pause",
        "e2e.first_token.appended_at_once_vs_bf16": "TTFT, 124 tokens appended to a cached prompt at once",
    },
    "Agents and host memory": {
        "agents.vs_bf16": "recorded coding agents within the targets, vs. stock bf16",
        "agents.vs_fp8": "recorded coding agents within the targets, vs. stock fp8",
        "agents.vs_fp8_hicache": "recorded coding agents within the targets, vs. stock fp8 with `hicache`",
        "agents.tiers_vs_static": "recorded coding agents within the targets, vs. `k4v4` without host memory",
        "agents.hit_of_endless_2x": "prefix-cache hit rate with host memory at twice the agents that it holds without, "
        "share of an infinite cache's",
        "agents.bfcl.vs_bf16": "agents in BFCL's dialogues within the targets, vs. stock bf16",
        "agents.bfcl.vs_fp8": "agents in BFCL's dialogues within the targets, vs. stock fp8",
        "agents.bfcl.vs_fp8_hicache": "agents in BFCL's dialogues within the targets, vs. stock fp8 with `hicache`",
        "agents.bfcl.tiers_vs_static": "agents in BFCL's dialogues within the targets, vs. `k4v4` without host memory",
        "agents.bfcl.hit_of_endless_2x": "the same for agents in BFCL's dialogues",
        "agents.demoted_ttft_ratio": "median TTFT of demoted k8v4 contexts, vs. before demotion",
        "agents.swap_in_alone_of_pcie": "time of a prefix of 100K tokens from host memory while nothing else runs",
        "agents.swap_out_of_pcie": "time of a prefix of 100K tokens to host memory",
        "agents.attention_beside_swap": "time of decode attention while a prefix comes back",
        "agents.layer_slowdown": "time of one layer of a decode step while a prefix comes back",
        "agents.swap_in_of_pcie": "time of a prefix of 100K tokens from host memory while a server decodes",
        "agents.decode_slowdown": "time of this server's decode steps meanwhile",
        "agents.swap_in_added": "time that the load adds to the TTFT, in copies of its bytes",
    },
    "Attention": {
        "decode.bandwidth.k8v4": "memory bandwidth of k8v4 decode attention, share of a device copy's",
        "decode.worst_vs_bf16": "k4v4 decode attention time, worst of batch sizes and lengths",
        "decode.worst_uneven": "decode attention time per byte, worst of uneven lengths or heads and other sizes",
        "extend.vs_stock.1": "attention time, 1 new token over 100K cached in k4v4",
        "extend.vs_stock.16": "attention time, 16 new tokens over 100K cached in k4v4",
        "extend.vs_stock.64": "attention time, 64 new tokens over 100K cached in k4v4",
        "extend.vs_stock.1k": "attention time, 1024 new tokens over 100K cached in k4v4",
        "extend.vs_stock.batch": "attention time, batch of 16, 64 new tokens each over 1K to 64K cached, worst",
    },
    "Attention scores and packing": {
        "score.prefill_overhead": "attention scores of the last 64 queries of a 16K prompt, share of a modeled prefill",
        "score.prefill_overhead_all": "attention scores of all its queries, share of a modeled prefill",
        "score.prefill_overhead_sampled": "attention scores of one query in 16, share of a modeled prefill",
        "score.decode_overhead": "attention scores while decoding (64 x 8K, one step in 32), share of a layer's step",
        "compaction.prefill_overhead": "packing a 16K prompt, share of a modeled prefill",
        "compaction.decode_overhead": "packing while decoding 64 sequences, share of a modeled step",
        "compaction.decode_overhead_exposed": "packing while decoding, host launches not hidden, share of a modeled "
        "step",
        "compaction.leankv_decode_overhead": "LeanKV, a block packed twice while decoding, share of a modeled step",
    },
}
OTHERS = {
    "Equal answers and bytes": {
        "serve.bf16_token_match": "uncompressed pages vs. stock, tokens up to the first difference",
        "serve.bf16_token_match.answers": "uncompressed pages vs. stock, whole answers",
        "serve.page_hash_match": "packed blocks with equal bytes under any order of operations",
        "serve.warm_warm_match": "repeated cached prompts with an unchanged answer (bf16, k4v4)",
        "agents.round_trips_equal": "answers that stay equal when contexts go to host memory or disk and come back",
        "agents.demoted_points": "exact match of demoted k8v4 contexts against contexts stored as k4v4, points",
        "agents.restart_warm_hit": "cached tokens that a server finds again on disk after SIGKILL under load",
        "agents.corrupt_served": "blocks served from files that were cut short or got a wrong bit",
        **{f"kits.gpu.{p}": f"SGLang's test kits that pass with {p}, CUDA graphs and overlap scheduling"
           for p in ("k4v4", "leankv", "quota")},
        "sanitizer.memcheck": "errors that compute-sanitizer's memcheck finds in the kernels of the commit named",
        "sanitizer.racecheck": "errors that compute-sanitizer's racecheck finds in the kernels of the commit named",
    },
    "Tokens and memory": {
        "serve.occupancy": "token slots of packed pages that hold a token, worst format",
        "serve.resident.k4v4": "concurrent requests in equal memory, prompts of 40% of it, k4v4",
        "papers.retraction_recompute": "tokens prefilled again after retractions, with host memory",
        "papers.retraction_recompute_pool": "the same without host memory",
        "papers.retraction_recompute_demoted": "the same without host memory, with `--kvc-floor k2v2`",
        "papers.retraction_recompute_reserved": "the same without host memory, if 80% of the longest answers are "
        "reserved",
        **{f"papers.leankv.pruned_share.{m}": f"tokens that leankv drops at the thresholds calibrated by answers, {t}"
           for m, t in MODELS.items()},
        **{f"quality.k4v2_over_k4v4_kl.{m}": f"mean KL of k4v2 against k4v4's, simulated, {t}"
           for m, t in MODELS.items()},
    },
    "Host time": {
        "current.host_step_vs_stock": "host time of a decode step of 256 requests of 32K tokens",
        "agents.off_overhead": "host time of a scheduler turn without host memory, vs. one without the tiers' code",
        "current.evict_us_100k": "time to evict a block of 64 tokens from a tree of 100,000 leaves",
    },
}  # fmt: skip
# Checks of the project itself: in scoreboard.json alone.
HIDDEN = ("current.refused_options", "current.sglang", "defects.open", "papers.abstracts")
REMARKS = {"agents.demoted_ttft_ratio": "within noise"}
OTHER = "Other figures"


def singles(board: dict[str, dict], names: list[str]) -> tuple[list[str], list[str]]:
    """Tables of single figures: those that depend on the GPU model, with one column per model, and all others."""
    names = [name for name in names if name not in HIDDEN]
    on_cards = {name for name in names if name.startswith(KEYED) and name not in ALIKE}
    head = ["figure", *CARDS.values(), "baseline", "n", "commit"]
    speed = _tables(SPEED, [n for n in names if n in on_cards], head, lambda name: _on_cards(board, name))
    head = ["figure", "value", "device", "baseline", "n", "commit"]
    others = _tables(OTHERS, [n for n in names if n not in on_cards], head, lambda name: _on_one(board[name]))
    return titled("Speed", speed), titled("Correctness and memory", others)


def _tables(groups: dict[str, dict[str, str]], names: list[str], head: list[str], cells) -> list[str]:
    """A table per group. `cells`: function from a name to the cells of its row behind the title."""
    known = set().union(*groups.values())
    groups = {**groups, OTHER: {name: f"`{name}`" for name in names if name not in known}}
    out = []
    for title, figures in groups.items():
        rows = [[text, *cells(name)] for name, text in figures.items() if name in names]
        out += titled(title, lines(head, rows), 3)
    return out


def _on_cards(board: dict[str, dict], name: str) -> list[str]:
    rows = [board.get(keyed_on(name, card)) for card in CARDS]
    known, remark = [r for r in rows if r], f", {REMARKS[name]}" if name in REMARKS else ""
    values = [f"{_bound(r)}{spread(r)}{_beside(r)}{remark}" if r else "" for r in rows]
    baselines = list(dict.fromkeys(worded(r["baseline"]) for r in known))
    if len(baselines) > 1:
        baselines = [f"{short(r['device'])}: {worded(r['baseline'])}" for r in known]
    counts, commits = dict.fromkeys(str(r["n"]) for r in known), dict.fromkeys(sha(r["commit"]) for r in known)
    return [*values, "; ".join(baselines), "; ".join(counts), "; ".join(commits)]


def _on_one(row: dict) -> list[str]:
    return [spread(row), short(row["device"]), worded(row["baseline"]), str(row["n"]), sha(row["commit"])]


def _bound(row: dict) -> str:
    return "at least " if row["unit"].endswith(", at least") else ""


def _beside(row: dict) -> str:
    """Time of the copy that runs at the same time, if the unit names it."""
    copy = re.search(r"beside a load of ([\d.]+) of a plain copy", row["unit"])
    return f", beside a load that takes {copy[1]}x as long as a plain copy" if copy else ""
