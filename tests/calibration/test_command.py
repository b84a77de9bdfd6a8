"""The command that turns a model folder and a text into a file that a server reads, and its refusals."""

from __future__ import annotations

import builtins
import io
import json
from types import SimpleNamespace

import pytest
import torch

from sglang_kvc import cli
from sglang_kvc.cache.sizing import make_layout
from sglang_kvc.calibration import tensors as calibration
from sglang_kvc.calibration import verdicts
from sglang_kvc.calibration.measure import command
from sglang_kvc.calibration.measure.progress import Progress
from sglang_kvc.calibration.model_fingerprint import identity_of
from sglang_kvc.options.resolve import resolve_config
from sglang_kvc.policies.quantize import Quantize

from .conftest import DIM, KV_HEADS, LAYERS, VOCAB, make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder with a tokenizer of one token per word, and a text of 600 words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    out = tmp_path_factory.mktemp("model")
    words = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(out)
    make_model("llama").to(torch.bfloat16).save_pretrained(out)
    numbers = torch.randint(0, VOCAB, (600,), generator=torch.Generator().manual_seed(7)).tolist()
    (out / "text.txt").write_text(" ".join(f"w{i}" for i in numbers))
    return out


def calibrate(folder, *more: str) -> int:
    base = ["calibrate", "--model-path", str(folder), "--text", str(folder / "text.txt"), "--device", "cpu"]
    return cli.main([*base, *more])


def test_command_writes_file_from_text(folder, tmp_path, capsys):
    out, picture = tmp_path / "found.safetensors", tmp_path / "found.png"
    more = ("--plot", str(picture), "--tokens", "560", "--retention", "0.9")
    assert calibrate(folder, "--out", str(out), *more) == 0
    printed = capsys.readouterr()
    assert "recommended" in printed.out and str(out) in printed.out
    assert "xkv: 90.0% of the attention with " in printed.out
    assert "[100 %]" in printed.err
    assert picture.read_bytes().startswith(b"\x89PNG")

    calibrated = verdicts.read(str(out))
    from transformers import AutoConfig

    assert calibrated.identity == identity_of(AutoConfig.from_pretrained(folder))
    assert (calibrated.settings["tokens"], calibrated.settings["dtype"]) == (560, "bfloat16")
    names = [result["format"] for result in calibrated.formats]
    assert len(names) == 5 and "k2v2" not in names  # the kernels have no 2-bit keys of 32 features
    server = resolve_config(SimpleNamespace(kvc_policy="xkv", kvc_high="k8v8", kvc_calibration=str(out)))
    assert calibrated.least_memory.retention == 0.9 and server.keep == calibrated.least_memory.keep
    stats = calibration.load(str(out), torch.device("cpu"))
    assert stats["query_mean"].shape == (LAYERS, 4, DIM)
    assert stats["rotary_frequencies"].shape == (DIM // 2,)
    from sglang_kvc.options.config import KvcConfig

    layout = make_layout(KvcConfig(), Quantize(), layers=LAYERS, heads=KV_HEADS, head_dim=DIM)
    calibration.check_shapes(str(out), calibration.BY_LAYER + calibration.BY_HEAD[:4], layout)


def test_answers_choose_thresholds(folder, tmp_path, capsys):
    file, out = tmp_path / "answers.jsonl", str(tmp_path / "found.safetensors")
    words = (folder / "text.txt").read_text().split()
    lines = [{"prompt": " ".join(words[:140]), "answer": f"w{i}"} for i in range(VOCAB)]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    assert calibrate(folder, "--answers", str(file), "--out", out, "--tokens", "560") == 0
    assert " of 1 answers kept" in capsys.readouterr().out  # one of all words is the most likely one
    findings = verdicts.read(out)
    assert findings is not None and findings.settings["answers"] == {"prompts": 1, "items": VOCAB}
    file.write_text(json.dumps({"prompt": "w1 " * 1100, "answer": "w1"}))
    assert calibrate(folder, "--answers", str(file), "--tokens", "560") == 1
    assert "has 1101 tokens, more than the 1024" in capsys.readouterr().err


@pytest.mark.parametrize(
    "more, words",
    [
        (("--tokens", "4000"), "choose 1024 or less"),
        (("--tokens", "300"), "longer text"),
        (("--text", "absent.txt"), "cannot be read"),
        (("--answers", "absent.jsonl"), "--answers absent.jsonl cannot be read"),
        (("--model-path", "/absent"), "cannot be read"),
        (("--device", "tpu"), "is not available"),
        (("--out", "/absent/file"), "does not exist"),
        (("--plot", "picture.jpeg"), ".png"),
        (("--retention", "1"), "--retention 1 is not a share"),
        (("--retention", "nan"), "--retention nan is not a share"),
    ],
    ids=str,
)
def test_wrong_arguments_are_rejected(folder, capsys, more, words):
    assert calibrate(folder, *more) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("error: ") and words in last and ";" in last


def test_command_works_without_matplotlib(folder, monkeypatch, capsys):
    real_import = builtins.__import__

    def no_matplotlib(name, *rest):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real_import(name, *rest)

    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    assert calibrate(folder, "--plot", "picture.png") == 1
    assert "sglang-kvc[plots]" in capsys.readouterr().err


def test_unsupported_models_are_rejected(folder):
    config = make_model("llama").config
    for changes, words in (({"head_dim": 48}, "heads of size 48"), ({"layer_types": ["sliding_attention"]}, "sliding")):
        for name, value in changes.items():
            setattr(config, name, value)
        with pytest.raises(command.CalibrateError, match=words):
            command.check_config(config, 100)


def test_progress_counts_to_end():
    out = io.StringIO()
    progress = Progress(out)
    progress.begin(20)
    for phase in ("one", "two"):
        for layer in range(10):
            progress.step(phase, layer, 10)
    lines = out.getvalue().splitlines()
    assert lines[-1] == "[100 %] two: layer 10 of 10" and "[ 50 %] one: layer 10 of 10" in lines
    Progress(out).step("nothing", 0, 1)
    assert out.getvalue().splitlines() == lines
