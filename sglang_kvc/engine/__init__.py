"""Execution of a forward pass: attention over the page store, and the warm-up of its kernels."""
