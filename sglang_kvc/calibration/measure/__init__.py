"""`sglang-kvc calibrate`: measures on a text how compression changes one model's predictions, and writes a calibration
file.

Needs torch and transformers, not SGLang.
"""
