"""Attention scores: their sums per cached token, collected by prefill and decode."""
