"""Measurements: one script per question, each writes one JSON file. Run from the repository root:

python -m bench.serve.ratio
"""
