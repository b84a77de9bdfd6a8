"""A compressed, radix-shared KV cache for SGLang servers.

* `errors.py`: `ConfigError`, and helpers for error messages.
* `calibration/`: calibration files and the fingerprint of a model; `measure/` is `sglang-kvc calibrate`.
* `policies/`: compression policies; see there for `scorers/` and `published/`.
* `cache/`: scheduler state of the compressed cache, and the runtime that owns them. Imports neither SGLang nor Triton.
* `options/`: server options, their checks and refusals, request quality.
* `engine/`: attention over the page store, and warm-up.
* `stats/`: statistics, the head map, `sglang-kvc inspect`.
* `adapter/`: the pool, allocator, radix cache and attention backend that SGLang calls.
* `cpu/`: the platform of servers without an accelerator.
* `demo/`: the demo model and its server.
* `cli.py`: the `sglang-kvc` command.

A package imports only packages to its left (`tests/test_imports.py`): errors < calibration < policies < cache < options
< calibration.measure < engine < stats < adapter < cpu < demo < cli
"""
