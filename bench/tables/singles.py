"""Figures that stand alone."""

from __future__ import annotations

from .questions import MODELS
from .text import ALIKE, CARDS, KEYED, keyed_on, lines, short, spread, titled

SINGLES = {
    "e2e.vs_bf16": "output tokens/s vs. stock bf16, equal KV memory, 64 x (4096 in + 512 out)",
    "e2e.vs_fp8": "output tokens/s vs. stock fp8, same load and memory",
    "e2e.ttft_vs_fp8": "median time to first token vs. stock fp8, same load and memory",
    "e2e.unconstrained_vs_bf16": "output tokens/s vs. stock bf16, ample KV memory, worst of the loads below",
    "e2e.unconstrained_vs_bf16_c1": "output tokens/s vs. stock bf16, ample KV memory, 1 session",
    "e2e.unconstrained_vs_bf16_c8": "output tokens/s vs. stock bf16, ample KV memory, 8 sessions",
    "e2e.unconstrained_vs_bf16_c64": "output tokens/s vs. stock bf16, ample KV memory, 64 sessions",
    "e2e.first_token.computed_vs_bf16": "time to first token, cold prompt, length that needs no padding",
    "e2e.first_token.computed_at_once_vs_bf16": "time to first token, cold prompt right behind another request",
    "e2e.first_token.computed_padded_vs_bf16": "time to first token, cold prompt that stock pads to a CUDA graph",
    "e2e.first_token.computed_padded_at_once_vs_bf16": "time to first token, padded cold prompt behind another request",
    "e2e.first_token.cached_vs_bf16": "time to first token, cached prompt after a pause",
    "e2e.first_token.cached_at_once_vs_bf16": "time to first token, cached prompt at once",
    "e2e.first_token.appended_vs_bf16": "time to first token, 124 tokens appended to a cached prompt after a pause",
    "e2e.first_token.appended_at_once_vs_bf16": "time to first token, 124 tokens appended to a cached prompt at once",
    "agents.vs_bf16": "recorded coding agents at the latency targets, vs. stock bf16",
    "agents.vs_fp8": "the same vs. stock fp8",
    "agents.vs_fp8_hicache": "the same vs. stock fp8 with its hierarchical cache",
    "agents.tiers_vs_static": "the same vs. k4v4 without host memory",
    "agents.hit_of_endless_2x": "prefix-cache hit rate with host memory, at twice the [knee](agents.md#measured)",
    "agents.bfcl.vs_bf16": "agents in BFCL's dialogues at the latency targets, vs. stock bf16",
    "agents.bfcl.vs_fp8": "the same vs. stock fp8",
    "agents.bfcl.vs_fp8_hicache": "agents in BFCL's dialogues at the targets, vs. stock fp8 with hierarchical cache",
    "agents.bfcl.tiers_vs_static": "the same vs. k4v4 without host memory",
    "agents.bfcl.hit_of_endless_2x": "their hit rate with host memory, at twice the knee",
    "agents.restart_warm_hit": "cached tokens that a server finds again on disk after SIGKILL under load",
    "agents.corrupt_served": "blocks served from files that were cut short or got a wrong bit",
    "agents.round_trips_equal": "answers that stay equal when contexts go to host memory or disk and come back",
    "agents.demoted_points": "exact match of demoted k8v4 contexts against contexts stored as k4v4, points",
    "agents.demoted_ttft_ratio": "median time to first token of demoted k8v4 contexts, vs. before demotion",
    "agents.swap_in_alone_of_pcie": "a prefix of 100K tokens from host memory, time while nothing else runs",
    "agents.swap_out_of_pcie": "the same to host memory",
    "agents.attention_beside_swap": "decode attention while a prefix comes back, time",
    "agents.layer_slowdown": "one layer of a decode step while a prefix comes back, time",
    "agents.swap_in_of_pcie": "a prefix of 100K tokens from host memory while a server decodes, time",
    "agents.decode_slowdown": "decode steps of this server meanwhile, time",
    "agents.swap_in_added": "what the load adds to the time to first token, in copies of its bytes",
    "agents.off_overhead": "host time of a scheduler turn without host memory, vs. one without the tiers' code",
    **{f"papers.leankv.pruned_share.{m}": f"tokens that leankv drops at the thresholds calibrated by answers, {t}"
       for m, t in MODELS.items()},
    "papers.abstracts": "policies after seven eviction papers ([list](papers.md#other-methods)) that serve",
    "papers.retraction_recompute": "tokens prefilled again after retractions, with host memory",
    "papers.retraction_recompute_pool": "the same without host memory",
    "papers.retraction_recompute_demoted": "the same without host memory, with --kvc-floor k2v2",
    "papers.retraction_recompute_reserved": "the same without host memory, if 0.8 of the longest answers are reserved",
    **{f"quality.k4v2_over_k4v4_kl.{m}": f"mean KL of k4v2 against k4v4's, simulated, {t}" for m, t in MODELS.items()},
    "decode.bandwidth.k8v4": "memory bandwidth of k8v4 decode attention, share of a device copy's",
    "decode.worst_vs_bf16": "k4v4 decode attention time, worst of batch sizes and lengths",
    "decode.worst_uneven": "decode attention time per byte, worst of uneven lengths or heads and other sizes",
    "extend.vs_stock.1": "attention time, 1 new token over 100K cached in k4v4",
    "extend.vs_stock.16": "attention time, 16 new tokens over 100K cached in k4v4",
    "extend.vs_stock.64": "attention time, 64 new tokens over 100K cached in k4v4",
    "extend.vs_stock.1k": "attention time, 1024 new tokens over 100K cached in k4v4",
    "extend.vs_stock.batch": "attention time, batch of 16, 64 new tokens each over 1K to 64K cached, worst",
    "score.prefill_overhead": "attention scores of the last 64 queries of a 16K prompt, share of a modeled prefill",
    "score.prefill_overhead_all": "attention scores of all its queries, share of a modeled prefill",
    "score.prefill_overhead_sampled": "attention scores of one query in 16, share of a modeled prefill",
    "score.decode_overhead": "attention scores while decoding (64 x 8K, one step in 32), share of a layer's step",
    "compaction.prefill_overhead": "packing a 16K prompt, share of a modeled prefill",
    "compaction.decode_overhead": "packing while decoding 64 sequences, share of a modeled step",
    "compaction.decode_overhead_exposed": "packing while decoding, host launches not hidden, share of a modeled step",
    "compaction.leankv_decode_overhead": "LeanKV, a block packed twice while decoding, share of a modeled step",
    "sanitizer.memcheck": "compute-sanitizer memcheck, errors in the kernels of the commit named",
    "sanitizer.racecheck": "compute-sanitizer racecheck, errors in the kernels of the commit named",
    "serve.occupancy": "token slots of packed pages that hold a token, worst format",
    "serve.resident.k4v4": "concurrent requests in equal memory, prompts of 40 % of it, k4v4",
    "serve.bf16_token_match": "uncompressed pages vs. stock, tokens up to the first difference",
    "serve.bf16_token_match.answers": "uncompressed pages vs. stock, whole answers",
    "serve.page_hash_match": "packed blocks with equal bytes under any order of operations",
    "serve.warm_warm_match": "repeated cached prompts with an unchanged answer (bf16, k4v4)",
    **{f"kits.gpu.{p}": f"SGLang's test kits that pass with {p}, CUDA graphs and overlap scheduling"
       for p in ("k4v4", "leankv", "quota")},
    "current.host_step_vs_stock": "host time of a decode step of 256 requests of 32K tokens",
    "current.evict_us_100k": "time to evict a block of 64 tokens from a tree of 100,000 leaves",
    "current.refused_options": "SGLang's options that are refused",
    "current.sglang": "supported SGLang release; 5.23 is 0.5.23",
    "defects.open": "defects that tests mark as known and open",
}


def singles(board: dict[str, dict], names: list[str]) -> list[str]:
    """Tables of single figures: those that depend on the GPU model, with one column per model, and all others."""
    on_cards, others = [], []
    for name in names:
        title = SINGLES.get(name, f"`{name}`")
        if name.startswith(KEYED) and name not in ALIKE:
            rows = [board.get(keyed_on(name, card)) for card in CARDS]
            known = [r for r in rows if r]
            values = [spread(r) if r else "" for r in rows]
            on_cards.append([title, *values, *(_join(known, f) for f in ("baseline", "n", "commit"))])
        else:
            row = board[name]
            others.append([title, spread(row), short(row["device"]), row["baseline"], str(row["n"]), row["commit"][:7]])
    speed = lines(["figure", *CARDS.values(), "baseline", "n", "commit"], on_cards)
    rest = lines(["figure", "value", "device", "baseline", "n", "commit"], others)
    return [*titled("Speed", speed), *titled("Correctness and memory", rest)]


def _join(rows: list[dict], field: str) -> str:
    return "; ".join(dict.fromkeys(str(r[field])[: 7 if field == "commit" else None] for r in rows))
