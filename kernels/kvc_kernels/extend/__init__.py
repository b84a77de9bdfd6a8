"""Extend attention: new tokens over a cached prefix and over themselves; `cuda/` has the CUDA C++ kernel for Hopper."""
