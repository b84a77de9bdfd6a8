"""A compressed, radix-shared KV cache for SGLang servers.

* `options/`: server options, their checks and refusals, model facts, request quality.
* `cache/`: CPU records of the compressed cache, and the runtime that owns them.
* `adapter/`: the pool, allocator, radix cache and attention backend that SGLang calls.
* `engine/`: attention over the page store, and warm-up.
* `policies/`: compression policies; `scorers/` has one file per scorer.
* `calibration/`: calibration files and their enforcement; `measure/` is `sglang-kvc calibrate`.
* `stats/`: statistics, the head map, `sglang-kvc inspect`.
* `cpu/`: the platform of servers without an accelerator.
* `demo/`: the demo model and its server.
* `cli.py`: the `sglang-kvc` command.
"""
