"""Scheduler state of the compressed cache, and the runtime that owns them. Nothing here imports sglang or triton.

`capacity.py` answers how much memory is needed. `packing.py` decides when a block is packed. `build.py`
makes the `Runtime`.
"""
