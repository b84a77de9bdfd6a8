"""Benchmarks of answer quality: real models and tasks, through a running server."""
