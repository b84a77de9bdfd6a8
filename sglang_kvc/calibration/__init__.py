"""Calibration files: their tensors and findings, and the fingerprint of the model. `measure/` writes them."""
