"""Policies of the eviction abstracts that serve, one server after another.

    python -m bench.serve.abstracts [--policies cake,dapq] [--calibration FILE] [--quick]

A policy serves if its server answers prompts, one long answer and a follow-up turn in full length, the follow-up finds
cached tokens, `/server_info` counts packed blocks and pruned tokens, and the log has no error. This says nothing about
the quality of answers. Without `--calibration`, statistics and gates come from a short text.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from bench import common, prompts
from bench.quality.policies import statistics_only

NAME = "serve/abstracts"
# Preset -> the method of the abstract.
METHODS = {
    "cake": "CAKE",
    "defensivekv": "DefensiveKV",
    "lazy-eviction": "LazyEviction",
    "compresskv": "CompressKV",
    "dapq": "DapQ",
    "arkv": "ARKV",
    "gate": "trained gate",
}
CALIBRATED = ("cake", "compresskv", "dapq", "arkv", "gate")
BLOCK, CHUNK = 64, 256
PROMPTS, ANSWER, FOLLOW_UP = (300, 700, 1100), 32, 40
LONG = 520  # tokens of the long answer: more than the lag of `lazy-eviction` and the four blocks that compete first
CALIBRATION_TOKENS, GATE_STEPS = 2048, 200


def calibrated(model: Path, folder: Path) -> Path:
    """A calibration file with gates, from a short text."""
    from sglang_kvc.calibration.measure import command, gates

    text, file = folder / "text.txt", folder / "calibration.safetensors"
    text.write_text(prompts.prose())
    command.run(str(model), str(text), str(file), tokens=CALIBRATION_TOKENS, device="cpu")
    wanted = ["--model-path", str(model), "--text", str(text), "--calibration", str(file)]
    if gates.main([*wanted, "--tokens", str(CALIBRATION_TOKENS), "--steps", str(GATE_STEPS)]):
        raise SystemExit("the gates were not trained")
    return statistics_only(file, folder)


def ask(server: common.Server, tok, long: int) -> dict:
    """Counts of what the server answered, and its statistics."""
    client = server.client
    texts = [prompts.cut(tok, prompts.prose(), n, start=3000 * i) for i, n in enumerate(PROMPTS)]
    answers = client.generate_many(texts, ANSWER, parallel=len(texts))
    first = client.generate(texts[0], long)
    more = prompts.cut(tok, prompts.prose(), FOLLOW_UP, start=12_000)
    turn = client.generate([*texts[0], *first.ids, *more], ANSWER)
    stats = client.when_idle()
    lengths = [len(x.ids) for x in (*answers, first, turn)]
    return {
        "full_answers": lengths == [*[ANSWER] * len(texts), long, ANSWER], "answer_tokens": lengths,
        "follow_up_cached_tokens": turn.cached_tokens,
        **{k: stats.get(k) for k in ("config", "packed_tokens", "blocks_by_format", "tokens_by_tier", "compactions",
                                     "ratio_body")},
    }  # fmt: skip


def serves(row: dict) -> bool:
    return bool(
        row.get("full_answers") and row["follow_up_cached_tokens"] and row["packed_tokens"]
        and (row["tokens_by_tier"] or {}).get("pruned") and not row["errors"]
    )  # fmt: skip


def measure(policy: str, tok, calibration: Path | None, long: int) -> dict:
    options = ["--sleep-on-idle", "--chunked-prefill-size", str(CHUNK)]
    if policy in CALIBRATED:
        options += ["--kvc-calibration", str(calibration)]
    row: dict = {"method": METHODS[policy]}
    server = common.Server(common.kvc(policy, *options, block=BLOCK, memory="256MiB"), env=common.STRICT)
    try:
        with server:
            row |= ask(server, tok, long)
            row["errors"] = server.errors()
    except Exception as e:  # the other policies are measured all the same
        row["errors"] = [f"{type(e).__name__}: {e}"]
    return row | {"serves": serves(row)}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--policies", default=",".join(METHODS))
    p.add_argument("--calibration", type=Path)
    p.add_argument("--quick", action="store_true", help="a shorter long answer, no result file")
    a = p.parse_args()
    policies, model = a.policies.split(","), common.demo_model()
    if unknown := set(policies) - set(METHODS):
        p.error(f"--policies {','.join(sorted(unknown))} is not among {','.join(METHODS)}")
    tok, rows = prompts.tokenizer(model), {}
    with tempfile.TemporaryDirectory(prefix="kvc-abstracts-") as folder:
        file = a.calibration
        if file is None and set(policies) & set(CALIBRATED):
            file = calibrated(model, Path(folder))
        for policy in policies:
            rows[policy] = measure(policy, tok, file, 100 if a.quick else LONG)
            print(policy, rows[policy], flush=True)
    if a.quick:
        return
    scores = {}
    if set(rows) == set(METHODS):
        unit = f"policies of {len(METHODS)} that answer, pack and prune"
        scores["papers.abstracts"] = common.Score(sum(r["serves"] for r in rows.values()), unit)
    common.write_result(NAME, {"block": BLOCK, "policies": rows}, scores=scores)


if __name__ == "__main__":
    main()
