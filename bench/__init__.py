"""Measurements: one script per question. Each writes one JSON file. Run them from the repository root:

python -m bench.serve.ratio
"""
