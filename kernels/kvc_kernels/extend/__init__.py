"""Prefill with cached prefix: attention of new tokens to the prefix in pages and to themselves."""
