"""Calibration files: their tensors and verdicts, the fingerprint of a model, and enforcement at server start."""
