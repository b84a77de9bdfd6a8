"""Tensor code of sglang_kvc: page layouts, the page store and the operations on it.

Imports torch and triton only, never sglang. Every operation has a plain-torch reference in `ops/`; a Triton
kernel of the same signature stands beside it where there is one.
"""
