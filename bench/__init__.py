"""Benchmarks. Each script answers one question and writes one JSON file. Run them from the repository root:

python -m bench.serve.ratio
"""
