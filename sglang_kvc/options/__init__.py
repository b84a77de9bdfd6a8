"""Server options: parsing, checks and refusals.

`server_args.KvcServerArgs` holds the options and runs the checks of a server's start, in this order. Each raises
`ConfigError` with one sentence.

1. Before SGLang resolves its arguments (`start.prepare`):
   `resolve.resolve_config` (text, policy, options that the policy does not read, then `validate.CHECKS`),
   `unsupported_args.check_args` (the table `ARG_REFUSALS`, then `conflicts.check_conflicts`), checks that depend on the
   device (`conflicts.check_memory_saver`, `check_dp_attention`), the CPU platform, `conflicts.check_memory`.
2. After it, with the model's config file (`start.verify`):
   `unsupported_models.check_facts` (the table `MODEL_REFUSALS`, sliding windows, the calibration file's model,
   `validate.check_geometry`, `check_one_shot`), `validate.check_pool`, fields that SGLang changed,
   `conflicts.check_chunk`.
3. In each scheduler process, with the built model and before its pool (`unsupported_models.check_model`):
   `unsupported_args.check_capability`, then `check_facts` again.

* `config.py`: `KvcConfig`, the record of all settings. `resolve.py` makes it, `validate.py` checks it.
* `calibration_file.py`: defaults and refusals from the file of `--kvc-calibration`.
* `model_facts.py`: traits of a model, read from SGLang.
* `start_warnings.py`: warnings about arguments that have no effect.
* `request_quality.py`, `request_hints.py`: parameters of single requests.
* `command_line.py`: reads the command line for code that runs before arguments are parsed.

Only `server_args.py`, `start.py` and `model_facts.py` import SGLang.
"""
