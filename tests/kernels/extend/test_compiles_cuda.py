"""The CUDA C++ kernels compile for Hopper without a GPU and use registers as planned."""

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton

from kvc_kernels.common import nvrtc
from kvc_kernels.extend import hopper as extend
from kvc_kernels.extend.attention import ExtendAttention
from kvc_kernels.formats import BF16, FORMATS
from kvc_kernels.layout import BlockFormat, PoolLayout, choose_page_bytes
from kvc_kernels.store import PageStore

SPILLS = 72  # allowed bytes; a few are spilled where tiles are listed or whole rows are copied


def kernel_constants(spec: str, *, rows=256, dtype=torch.bfloat16, capped=False, page=0) -> str:
    formats = [FORMATS[n] for n in spec.split("+") if n]
    one_tier = len(formats) == 1
    size = page or choose_page_bytes(
        formats, head_dim=128, block_tokens=128, has_scores=not one_tier, whole=one_tier
    )
    layout = PoolLayout(2, 8, 128, 128, size, not one_tier)
    block_formats = (BlockFormat(BF16), BlockFormat(*formats)) if formats else (BlockFormat(BF16),)
    store = PageStore.create(layout, block_formats, num_pages=4, num_blocks=2, device="cpu", dtype=dtype)
    op = ExtendAttention(store, query_heads=32, dense="none")
    return extend.constants(store, 4, op._classes, rows, capped)


def registers(cubin: bytes, path: Path) -> dict[str, int]:
    """The highest register that each function of the module uses."""
    path.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    text = subprocess.run([tool, "-c", path], capture_output=True, text=True, check=True).stdout
    highest, function = {}, ""
    for line in text.splitlines():
        if (label := re.match(r"(\$\w+\$\w+|\.text\.\w+):$", line.strip())) is not None:
            function = label[1]
        for r in re.findall(r"\bR(\d+)\b", line):
            highest[function] = max(highest.get(function, 0), int(r) + 1)
    return highest


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec, options",
    [
        ("k4v4", {}),
        ("k4v4", dict(rows=128)),
        ("k8v8", dict(dtype=torch.float16)),
        ("k8v4+k4v2", dict(capped=True)),
        ("k8v4+k4v2", {}),
        ("k2v2", dict(page=5000)),
        ("", {}),
    ],
)
def test_extend_kernel_compiles_within_register_budget(spec, options, tmp_path):
    if not spec:
        options = {**options, "page": 4096}
    cubin, log = nvrtc.compile_source("extend.cu", kernel_constants(spec, **options))
    assert "serialized" not in log  # otherwise products would wait for each other
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill", log)]
    assert spills and max(spills) <= SPILLS, log
    unpack = extend.REGISTERS[options.get("rows", 256)][1]
    called = {name: n for name, n in registers(cubin, tmp_path / "extend.cubin").items() if name.startswith("$")}
    assert called and all(n <= unpack for n in called.values()), called


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec, options",
    [
        ("k4v4", dict(rows=64)),
        ("k4v4", dict(rows=32)),
        ("k8v8", dict(rows=64, dtype=torch.float16)),
        ("k8v4+k4v8", dict(rows=64, capped=True)),
        ("", dict(rows=64, page=4096)),
    ],
)
def test_few_row_kernel_compiles_within_register_budget(spec, options, tmp_path):
    cubin, log = nvrtc.compile_source("few.cu", kernel_constants(spec, **options))
    assert "serialized" not in log
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill", log)]
    assert spills and not max(spills), log
    highest = registers(cubin, tmp_path / "few.cubin")
    assert highest[".text.extend"] <= extend.FEW_REGISTERS[0], highest


@pytest.mark.parametrize(
    "struct, source", [(extend.Arguments, "extend_arguments.cuh"), (extend.MergeArguments, "extend_merge.cuh")]
)
def test_arguments_match_kernel_struct(struct, source):
    text = (nvrtc.SOURCES / source).read_text()
    body = re.search(rf"struct {struct.__name__} \{{(.*?)\}};", text, re.S)[1]
    body = re.sub(r"//.*", "", body)
    names = [re.sub(r"^.*[\s*]", "", part.strip()) for line in body.split(";") for part in line.split(",")]
    assert [n for n in names if n] == [name for name, _ in struct._fields_]


def test_compile_error_names_problem():
    with pytest.raises(RuntimeError, match=r"extend.cu does not compile:(.|\n)*KVC_CLASSES"):
        nvrtc.compile_source("extend.cu", "")


def test_missing_compiler_logs_one_line(monkeypatch, caplog):
    def missing():
        raise OSError("libnvrtc.so.13: cannot open shared object file")

    nvrtc.available.cache_clear()
    monkeypatch.setattr(nvrtc, "_nvrtc", missing)
    assert not nvrtc.available()
    assert [r.levelname for r in caplog.records] == ["WARNING"] and "libnvrtc" in caplog.text
    nvrtc.available.cache_clear()


def test_supports_only_cases_kernel_was_written_for():
    def store(**changes):
        layout = SimpleNamespace(**{"head_dim": 128, "block_tokens": 128, **changes})
        return SimpleNamespace(device=torch.device("cuda"), layout=layout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        assert extend.supports(store())
        assert not extend.supports(store(head_dim=64))
        assert not extend.supports(store(block_tokens=2 * extend.MAX_BLOCK_TOKENS))
        patch.setattr(extend, "available", lambda: False)  # then the Triton kernel serves
        assert not extend.supports(store())
        patch.setattr(extend, "available", lambda: True)
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
        assert not extend.supports(store())
