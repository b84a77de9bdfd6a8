"""`sglang-kvc calibrate`: measures on a text what compression does to one model, and writes a calibration file.

Needs torch and transformers, not SGLang.
"""
