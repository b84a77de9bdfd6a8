"""Attention scores: sums of attention probabilities per cached token, collected by prefill and decode."""
