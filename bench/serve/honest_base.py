"""Token-for-token comparison of our cache without compression (`--kvc-high bf16`) with stock SGLang.

    python -m bench.serve.honest_base [--quick] [--tokens 32] [--block 64] [--chunk 256]

Both servers get the same prompts, one at a time, and decode greedily: questions, four questions about each of four
shared passages, long prose and code in prefill chunks of 256, and dialogues of three turns. On a CPU, stock uses
torch_native attention. At the first difference of two answers, the log-probabilities of both candidates must be within
0.05 nat in both runs. The exit status is 1 if they are not, or if a prefix hit has an unexpected length.
"""

from __future__ import annotations

import argparse
import sys

from bench import common, prompts
from bench.client import Answer
from bench.common import Score
from bench.compare import TIE, match
from bench.prompts import Prompt
from bench.serve.cold_warm import UP_TO

NAME = "serve/honest_base"


def common_prefix(a, b) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


class Session:
    """Sends prompts to one server, one at a time, and checks the length of each prefix hit."""

    def __init__(self, server: common.Server, tok, block: int, tokens: int):
        self.server, self.tok, self.block, self.tokens = server, tok, block, tokens
        self.cached: list[list[int]] = []
        self.sent: list[Prompt] = []
        self.answers: dict[str, Answer] = {}
        self.wrong_hits: list[str] = []

    def flush(self) -> None:
        self.server.client.flush()
        self.cached = []

    def ask(self, prompt: Prompt) -> Answer:
        answer = self.server.client.generate(prompt.ids, self.tokens, top=5)
        prefix = max([common_prefix(prompt.ids, ids) for ids in self.cached], default=0)
        hit = min(prefix, len(prompt.ids) - 1) // self.block * self.block
        if answer.cached_tokens != hit:
            self.wrong_hits.append(f"{prompt.name}: {answer.cached_tokens} tokens cached instead of {hit}")
        self.cached.append([*prompt.ids, *answer.ids[:-1]])
        self.sent.append(prompt)
        self.answers[prompt.name] = answer
        return answer

    def run(self, singles: list[Prompt], dialogues: int, texts: dict[str, str] | None = None) -> dict[str, str]:
        """Send all prompts and return the answers of the dialogues. Dialogues continue from `texts`, the answers of the
        reference run; by default from their own."""
        for kind in dict.fromkeys(p.kind for p in singles):
            self.flush()
            for prompt in singles:
                if prompt.kind == kind:
                    self.ask(prompt)
        self.flush()
        answers: dict[str, str] = {}
        for n in range(dialogues):
            history: list[str] = []
            for _ in prompts.DIALOGUES[n]:
                prompt = prompts.dialogue(self.tok, n, history)
                answers[prompt.name] = self.ask(prompt).text
                history.append((texts or answers)[prompt.name])
        return answers


def compared(reference: Session, ours: Session) -> list[dict]:
    """One row per prompt. Both sessions must have sent the same prompts."""
    assert [p.ids for p in reference.sent] == [p.ids for p in ours.sent]
    rows = []
    for prompt in ours.sent:
        a, b = reference.answers[prompt.name], ours.answers[prompt.name]
        head = {"name": prompt.name, "kind": prompt.kind, "prompt_tokens": a.prompt_tokens}
        rows.append({**head, "cached": [a.cached_tokens, b.cached_tokens], **match(a, b).to_dict()})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a fifth of the prompts")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--block", type=int, default=64, help="tokens of a block, and of a page on stock")
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a prefill chunk")
    args = parser.parse_args()

    tok = prompts.tokenizer(common.demo_model())
    singles = prompts.single(tok)[:: 5 if args.quick else 1]
    dialogues = 1 if args.quick else len(prompts.DIALOGUES)
    # bf16 logits come in steps of 0.125 nat; with the last product in fp32, a small gap is really a tie.
    extra = ["--chunked-prefill-size", str(args.chunk), "--enable-fp32-lm-head"]

    with common.Server(common.stock("--page-size", str(args.block), *extra)) as server:
        reference = Session(server, tok, args.block, args.tokens)
        texts = reference.run(singles, dialogues)
    with common.Server(common.kvc("bf16", *extra, block=args.block), env=common.STRICT) as server:
        ours = Session(server, tok, args.block, args.tokens)
        ours.run(singles, dialogues, texts)
        errors = server.errors()

    rows = compared(reference, ours)
    different = [r for r in rows if not r["same"]]
    too_far = [r for r in different if not r["tie"]]
    equal, ties = len(rows) - len(different), len(different) - len(too_far)
    for r in different:
        verdict = f"within {TIE} nat" if r["tie"] else "TOO FAR"
        print(f"{r['name']}: differs at token {r['equal']} of {r['total']}, gap {r['gap']:.4f} nat, {verdict}")
    numbers = {
        "prompts": len(rows),
        "prompts_digest": prompts.digest(ours.sent),
        "answer_tokens": args.tokens,
        "block": args.block,
        "chunk": args.chunk,
        "equal": equal,
        "parted_within_tie": ties,
        "parted_too_far": len(too_far),
        "tie_nats": TIE,
        "largest_drift": max(r["drift"] for r in rows),
        "by_kind": {k: _share(rows, k) for k in dict.fromkeys(r["kind"] for r in rows)},
        "wrong_hits": {"stock": reference.wrong_hits, "kvc": ours.wrong_hits},
        "server_errors": errors,
        "rows": rows,
    }
    full_scores = {} if args.quick else scores(numbers, common.device_name())
    common.write_result(NAME + ("_quick" if args.quick else ""), numbers, scores=full_scores)
    print(f"{equal} of {len(rows)} answers equal, {ties} differ at a tie, {len(too_far)} differ otherwise")
    problems = [*ours.wrong_hits, *errors, *(f"{r['name']} has a gap of {r['gap']:.3f} nat" for r in too_far)]
    for line in problems:
        print("PROBLEM:", line)
    return 1 if problems else 0


def scores(numbers: dict, device: str) -> dict[str, Score]:
    """n is the number of prompts."""
    rows, baseline = numbers["rows"], f"stock on the same {'CPU' if device.startswith('CPU') else 'GPU'}"
    tokens = sum(r["equal"] for r in rows) / sum(min(r["equal"] + 1, r["total"]) for r in rows)
    unit = f"share of answers of {numbers['answer_tokens']} tokens"
    return {
        "serve.bf16_token_match": Score(tokens, UP_TO, baseline, n=len(rows)),
        "serve.bf16_token_match.answers": Score(numbers["equal"] / len(rows), unit, baseline, n=len(rows)),
    }


def _share(rows: list[dict], kind: str) -> str:
    same = [r["same"] for r in rows if r["kind"] == kind]
    return f"{sum(same)}/{len(same)}"


if __name__ == "__main__":
    sys.exit(main())
