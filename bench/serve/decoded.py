"""Comparison of blocks filled by decoding with blocks filled by a prefill, at several page sizes.

    python -m bench.serve.decoded [--caches stock,bf16,k4v4/64,k4v4/32,k4v4/48] [--texts 6] [--block 64]

The server answers a prompt. A longer prompt, made of prompt, answer and a few more words, is then sent three times:
over the decoded blocks, cold, and over the blocks of the cold run. *Drift* is the largest difference of a token's
log-probability up to the first token that differs. Decoding computes each row alone, so its products round differently
than in a prefill, also in stock SGLang. Blocks of a prefill should give no drift. `k4v4/48` has pages of 48 tokens, so
the second page of every block is partly filled.
"""

from __future__ import annotations

import argparse
import statistics

from bench import common, prompts
from bench.compare import match
from kvc_kernels.formats import FORMATS
from kvc_kernels.layout import page_bytes_for
from sglang_kvc.calibration.model_fingerprint import identity_of

NAME = "serve/decoded"
CACHES = "stock,bf16,k4v4/64,k4v4/32,k4v4/48"


def options(cache: str, block: int, head_dim: int) -> list[str]:
    """Server options of `stock`, a format, or `format/tokens per page`."""
    extra = ["--chunked-prefill-size", str(2 * block), "--enable-fp32-lm-head"]
    if cache == "stock":
        return common.stock("--page-size", str(block), "--max-total-tokens", "8192", *extra)
    name, _, tokens = cache.partition("/")
    if tokens:
        size = page_bytes_for(FORMATS[name], int(tokens), head_dim=head_dim, has_scores=False)
        extra += ["--kvc-page-bytes", str(size)]
    return common.kvc(name, *extra, block=block, memory="256MiB")


def drifts(server: common.Server, tok, texts: int, block: int) -> list[dict]:
    """One row per text: drift over decoded and over prefilled blocks, and whether the answers are equal."""
    out, chapter = [], prompts.chapter("assignment")
    for i in range(texts):
        prompt = prompts.cut(tok, chapter, 3 * block + 10, start=211 * i)
        more = prompts.cut(tok, chapter, 20, start=600 + 211 * i)
        server.client.flush()
        answer = server.client.generate(prompt, 2 * block, logprobs=True)
        longer = [*prompt, *answer.ids, *more]
        decoded = server.client.generate(longer, 16, top=3)
        server.client.flush()
        cold, warm = (server.client.generate(longer, 16, top=3) for _ in range(2))
        if not (decoded.cached_tokens == warm.cached_tokens == 5 * block and cold.cached_tokens == 0):
            raise RuntimeError(f"hits of {decoded.cached_tokens}, {cold.cached_tokens}, {warm.cached_tokens} tokens")
        a, b = match(cold, decoded), match(cold, warm)
        out.append({"decoded": a.drift, "decoded_same": a.same, "prefilled": b.drift, "prefilled_same": b.same})
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--caches", default=CACHES)
    parser.add_argument("--texts", type=int, default=6)
    parser.add_argument("--block", type=int, default=64)
    args = parser.parse_args()
    model = common.demo_model()
    from transformers import AutoConfig

    tok, dim = prompts.tokenizer(model), identity_of(AutoConfig.from_pretrained(model)).head_dim
    numbers: dict = {"block": args.block, "caches": {}}
    for cache in args.caches.split(","):
        with common.Server(options(cache, args.block, dim), env=common.STRICT) as server:
            rows = drifts(server, tok, args.texts, args.block)
        decoded = [r["decoded"] for r in rows]
        numbers["caches"][cache] = {
            "mean": statistics.fmean(decoded),
            "max": max(decoded),
            "same_answers": sum(r["decoded_same"] for r in rows),
            "prefilled_max": max(r["prefilled"] for r in rows),
            "rows": rows,
        }
        print(cache, {k: v for k, v in numbers["caches"][cache].items() if k != "rows"}, flush=True)
        common.write_result(NAME, numbers, quiet=True)


if __name__ == "__main__":
    main()
