"""The command `sglang-kvc calibrate`: reads model and text, measures, writes file and plot, prints a table."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from sglang_kvc.calibration.model_fingerprint import identity_of
from sglang_kvc.calibration.verdicts import Findings
from sglang_kvc.options.unsupported_models import SUPPORTED_HEAD_DIMS

from . import answer_items, least_memory, plot
from .capture import CalibrateError
from .passes import BLOCK, calibrate
from .progress import Progress


def main(args: argparse.Namespace) -> int:
    begin = time.monotonic()
    try:
        options = {"tokens": args.tokens, "device": args.device, "picture": args.plot, "answers": args.answers}
        findings = run(args.model_path, args.text, args.out, retention=args.retention, **options)
    except CalibrateError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    print(table(findings))
    print(f"\nwritten in {time.monotonic() - begin:.0f} s: {args.out}" + (f", {args.plot}" if args.plot else ""))
    print(f"serve with it: --kv-backend kvc --kvc-calibration {args.out}")
    return 0


def run(
    model_path: str,
    text: str,
    out: str,
    *,
    tokens: int = 4096,
    device: str = "auto",
    picture: str | None = None,
    answers: str | None = None,
    retention: float | None = None,
) -> Findings:
    """Findings of a calibration, written to `out`. CalibrateError, without a full stop, before any long computation
    except the exact passes over the prompts of `answers`."""
    for path in (out, picture):
        if path is not None and not Path(path).resolve().parent.is_dir():
            raise CalibrateError(f"{path} cannot be written, because its folder does not exist; make it first")
    if picture is not None:
        plot.check(picture)
    if retention is not None:
        least_memory.check(retention)
    try:
        words = Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise CalibrateError(f"--text {text} cannot be read ({e}); give a file of plain text") from None

    items = None if answers is None else answer_items.read(answers)
    device = device_named(device)
    model, ids = load(model_path, words, tokens)
    prompts = None
    if items is not None:
        longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        tokenizer = AutoTokenizer.from_pretrained(model_path)
        prompts = answer_items.shared_prompts(items, tokenizer, BLOCK, longest)
    ids = torch.tensor(ids, device=device)
    result = calibrate(model.to(device), ids, progress=Progress(sys.stderr), prompts=prompts, retention=retention)
    result.save(out)
    if picture is not None:
        plot.draw(result, Path(picture))
    return result.findings()


def device_named(name: str) -> str:
    """The device for `--device` `name`. CalibrateError for one that this machine lacks."""
    available = torch.cuda.is_available()
    if name == "auto":
        return "cuda" if available else "cpu"
    kind = name.split(":")[0]
    if kind not in ("cuda", "cpu") or (kind == "cuda" and not available):
        raise CalibrateError(f"--device {name} is not available; choose cpu, cuda if there is a GPU, or auto")
    return name


def load(model_path: str, words: str, tokens: int):
    """The model in 16 bits, as a server loads it, and the first `tokens` token ids of the text."""
    logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(model_path)
        check_config(config, tokens)
        ids = AutoTokenizer.from_pretrained(model_path)(words, verbose=False).input_ids[:tokens]
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype="auto").eval()
    except (OSError, ValueError) as e:
        raise CalibrateError(
            f"--model-path {model_path} cannot be read ({str(e).splitlines()[0].rstrip('.')}); give the folder of a "
            f"model with its tokenizer"
        ) from None
    if next(model.parameters()).dtype not in (torch.bfloat16, torch.float16):
        model = model.to(torch.bfloat16)
    return model, ids


def check_config(config, tokens: int) -> None:
    """CalibrateError for a model that cannot be served compressed, or that reads fewer tokens."""
    if tokens < 1:
        raise CalibrateError(f"--tokens {tokens} must be positive; use a few thousand")
    text, identity = config.get_text_config(), identity_of(config)
    longest = getattr(text, "max_position_embeddings", None)
    if longest and tokens > longest:
        raise CalibrateError(f"--tokens {tokens} is more than this model reads; choose {longest} or less")
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    if kinds or identity.head_dim not in SUPPORTED_HEAD_DIMS:
        what = f"layers of the kind {sorted(kinds)[0]}" if kinds else f"heads of size {identity.head_dim}"
        raise CalibrateError(
            f"{identity.architecture} has {what}, which the compressed cache cannot serve; serve it with "
            f"--kv-backend default"
        )


def table(findings: Findings) -> str:
    """The findings for a terminal."""
    head = "format  bytes/token  KL mean   KL p99    NLL diff  equal top-1  verdict"
    lines = [str(findings.identity), "", head]
    for r in findings.formats:
        lines.append(
            f"{r['format']:6} {r['token_bytes']:12.0f}  {r['kl_mean']:<9.4f} {r['kl_p99']:<9.4f} "
            f"{r['nll_delta']:<+9.4f} {100 * r['top1_equal']:8.1f} %   {r['verdict']}"
        )
    t = findings.thresholds
    thresholds = f"leankv {t.high}+{t.low}: alpha-high {t.alpha_high:g}, alpha-low {t.alpha_low:g}"
    kept = [
        f"  {r['alpha_high']:g}, {r['alpha_low']:g}: {r['answers']['right']} of {r['answers']['of']} answers kept"
        for r in findings.tried
        if "answers" in r
    ]
    lines += ["", f"recommended: {findings.recommended}", thresholds, *kept]
    if (least := findings.least_memory) is not None:
        lines.append(
            f"xkv: {least.retention:.1%} of the attention with {least.keep:.1%} of the tokens, {least.ratio:.2f}x "
            f"smaller; layers keep {min(least.layers):.1%} to {max(least.layers):.1%}"
        )
    return "\n".join(lines)
