"""Is the compressed cache with nothing compressed the same as SGLang's own, token for token?

    python -m bench.serve.honest_base [--quick] [--tokens 32] [--block 64] [--chunk 256]

The same prompts go to stock SGLang (torch_native attention on a CPU) and to `--kv-backend kvc --kvc-high
bf16`, one at a time and greedily: questions, four questions behind each of four shared passages, long
prose and code in prefill chunks of 256, and dialogues of three turns. Where two answers part, both
candidates' log-probabilities in both runs are recorded; they must be within 0.05 nat. Ends with an error
otherwise, or when a prefix hit is not where it should be.
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
    n = 0
    for x, y in zip(a, b):
        if x != y:
            break
        n += 1
    return n


class Session:
    """Asks one server, one prompt after the other, and knows which hit each must have."""

    def __init__(self, server: common.Server, tok, block: int, tokens: int):
        self.server, self.tok, self.block, self.tokens = server, tok, block, tokens
        self.seen: list[list[int]] = []
        self.asked: list[Prompt] = []
        self.answers: dict[str, Answer] = {}
        self.wrong_hits: list[str] = []

    def flush(self) -> None:
        self.server.client.flush()
        self.seen = []

    def ask(self, prompt: Prompt) -> Answer:
        answer = self.server.client.generate(prompt.ids, self.tokens, top=5)
        reach = max([common_prefix(prompt.ids, s) for s in self.seen], default=0)
        hit = min(reach, len(prompt.ids) - 1) // self.block * self.block
        if answer.cached_tokens != hit:
            self.wrong_hits.append(f"{prompt.name}: {answer.cached_tokens} tokens cached instead of {hit}")
        self.seen.append([*prompt.ids, *answer.ids[:-1]])
        self.asked.append(prompt)
        self.answers[prompt.name] = answer
        return answer

    def run(
        self, singles: list[Prompt], dialogues: int, texts: dict[str, str] | None = None
    ) -> dict[str, str]:
        """All prompts. `texts` are the answers that dialogues continue from; the reference run makes them."""
        for kind in dict.fromkeys(p.kind for p in singles):
            self.flush()
            for prompt in singles:
                if prompt.kind == kind:
                    self.ask(prompt)
        self.flush()
        made: dict[str, str] = {}
        for n in range(dialogues):
            said: list[str] = []
            for _ in prompts.DIALOGUES[n]:
                prompt = prompts.dialogue(self.tok, n, said)
                answer = self.ask(prompt)
                made[prompt.name] = answer.text
                said.append((texts or made)[prompt.name])
        return made


def compared(reference: Session, ours: Session) -> list[dict]:
    """A row for each prompt, which both must have asked."""
    assert [p.ids for p in reference.asked] == [p.ids for p in ours.asked]
    rows = []
    for prompt in ours.asked:
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
    parser.add_argument("--block", type=int, default=64, help="tokens of a block, and of a page of stock")
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a prefill chunk")
    args = parser.parse_args()

    tok = prompts.tokenizer(common.demo_model())
    singles = prompts.single(tok)[:: 5 if args.quick else 1]
    dialogues = 1 if args.quick else len(prompts.DIALOGUES)
    # bf16 logits come in steps of 0.125 nat; the last product in fp32 makes a tie a tie.
    extra = ["--chunked-prefill-size", str(args.chunk), "--enable-fp32-lm-head"]

    with common.Server(common.stock("--page-size", str(args.block), *extra)) as server:
        reference = Session(server, tok, args.block, args.tokens)
        texts = reference.run(singles, dialogues)
    with common.Server(common.kvc("bf16", *extra, block=args.block), env=common.STRICT) as server:
        ours = Session(server, tok, args.block, args.tokens)
        ours.run(singles, dialogues, texts)
        errors = server.errors()

    rows = compared(reference, ours)
    same = [r for r in rows if r["same"]]
    apart = [r for r in rows if not r["same"]]
    far = [r for r in apart if not r["tie"]]
    for r in apart:
        verdict = f"within {TIE} nat" if r["tie"] else "TOO FAR"
        print(f"{r['name']}: parts at token {r['equal']} of {r['total']}, gap {r['gap']:.4f} nat, {verdict}")
    numbers = {
        "prompts": len(rows),
        "prompts_digest": prompts.digest(ours.asked),
        "answer_tokens": args.tokens,
        "block": args.block,
        "chunk": args.chunk,
        "equal": len(same),
        "parted_within_tie": len(apart) - len(far),
        "parted_too_far": len(far),
        "tie_nats": TIE,
        "largest_drift": max(r["drift"] for r in rows),
        "by_kind": {k: _share(rows, k) for k in dict.fromkeys(r["kind"] for r in rows)},
        "wrong_hits": {"stock": reference.wrong_hits, "kvc": ours.wrong_hits},
        "server_errors": errors,
        "rows": rows,
    }
    found = {} if args.quick else scores(numbers, common.device_name())
    common.write_result(NAME + ("_quick" if args.quick else ""), numbers, scores=found)
    print(
        f"{len(same)} of {len(rows)} answers equal, {len(apart) - len(far)} part at a tie, {len(far)} do not"
    )
    problems = [*ours.wrong_hits, *errors, *(f"{r['name']} parts by {r['gap']:.3f} nat" for r in far)]
    for line in problems:
        print("PROBLEM:", line)
    return 1 if problems else 0


def scores(numbers: dict, device: str) -> dict[str, Score]:
    """n is the number of prompts."""
    rows, baseline = numbers["rows"], f"stock on the same {'CPU' if device.startswith('CPU') else 'GPU'}"
    tokens = sum(r["equal"] for r in rows) / sum(min(r["equal"] + 1, r["total"]) for r in rows)
    whole = f"share of answers of {numbers['answer_tokens']} tokens"
    return {
        "serve.bf16_token_match": Score(tokens, UP_TO, baseline, n=len(rows)),
        "serve.bf16_token_match.answers": Score(numbers["equal"] / len(rows), whole, baseline, n=len(rows)),
    }


def _share(rows: list[dict], kind: str) -> str:
    mine = [r for r in rows if r["kind"] == kind]
    return f"{sum(r['same'] for r in mine)}/{len(mine)}"


if __name__ == "__main__":
    sys.exit(main())
