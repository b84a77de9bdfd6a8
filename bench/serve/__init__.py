"""Benchmarks and checks of a running server."""
