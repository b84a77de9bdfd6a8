"""Decode attention: one query token per request over the page store, and the snapshot of a step."""
