"""`sglang-kvc calibrate`: what compression does to one model, measured on text of the user's, into one file.

Needs transformers and torch; never SGLang.
"""
