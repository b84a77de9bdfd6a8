"""Traces of served decode steps: when one begins, and the table that is made of it."""

import gzip
import json
import threading

import pytest

from bench.e2e import plot, serving, trace


def event(name, ts, dur, cat="kernel"):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}


def test_table_of_a_trace(tmp_path):
    events = [
        event("gemm", 1000.0, 500.0),
        event("gemm", 1600.0, 300.0),
        event("attend", 1500.0, 100.0),
        event("Memcpy HtoD", 1950.0, 50.0, "gpu_memcpy"),
        event("aten::mm", 0.0, 9000.0, "cpu_op"),
        event("cudaHostAlloc", 0.0, 7000.0, "cuda_runtime"),
        {"ph": "M", "name": "process_name"},
        {"ph": "i", "cat": "kernel", "name": "a mark", "ts": 0.0},
    ]
    path = tmp_path / "x.trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)
    found = trace.profile(path, most=4)
    assert found["kernels"][:2] == [
        {"name": "gemm", "count": 2, "total_ms": 0.8, "max_ms": 0.5},
        {"name": "attend", "count": 1, "total_ms": 0.1, "max_ms": 0.1},
    ]
    assert found["calls"] == [{"name": "cudaHostAlloc", "count": 1, "total_ms": 7.0, "max_ms": 7.0}]
    assert (found["span_ms"], found["busy_ms"]) == (1.0, 0.95)
    assert len(found["kernels"]) == 3 and len(trace.table(found).splitlines()) == 6
    assert trace.profile(path, most=2)["kernels"] == found["kernels"][:2]
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events[6:]}, file)
    assert trace.profile(path) == {"span_ms": 0.0, "busy_ms": 0.0, "kernels": [], "calls": []}


def test_a_trace_begins_when_all_decode(tmp_path, monkeypatch):
    log, over = tmp_path / "server.log", threading.Event()
    line = "Decode batch, #running-req: {}, #token: 9, token usage: 0.01, \n"
    earlier, both = 2 * line.format(64), line.format(64) + line.format(64)
    log.write_text(earlier + "Prefill batch, #running-req: 64, \n" + line.format(6) + both)
    serving.when_decoding(log, len(earlier), 64, over)
    monkeypatch.setattr(serving, "DECODE_WAIT", 0.2)
    with pytest.raises(RuntimeError, match="never said twice that 6 requests"):
        serving.when_decoding(log, 0, 6, over)
    over.set()
    monkeypatch.setattr(serving, "DECODE_WAIT", 60)
    with pytest.raises(RuntimeError, match="never"):
        serving.when_decoding(log, 0, 6, over)


def test_a_profile_is_no_run():
    runs = {"bf16.c64": {"output_tok_s": 1.0}, "bf16": {"profile": {"kernels": []}}}
    assert len(serving.table(runs).splitlines()) == 2
    assert serving.scores(runs, serving.arguments(["--model", "x"])) == {}


def test_points_of_a_picture():
    runs = {f"{n}.{mark}{k}": {"x": k} for n in ("bf16", "kvc_k4v4") for k in (64, 8) for mark in "ca"}
    found = plot.points({**runs, "sessions": {}, "bf16": {"profile": {}}, "bf16.cached.pause": {}}, "a")
    assert list(found) == [8, 64] and found[64] == {"bf16": {"x": 64}, "kvc_k4v4": {"x": 64}}
