"""Systems as their papers describe them: LeanKV, H2O, SnapKV, KV-Compress, DefensiveKV, CompressKV, and presets that
are named after papers.

Available, but not recommended. They keep tokens by the attention scores of the request that fills a block, and later
requests with the same prefix ask for other tokens. docs/quality.md compares them with `quantise` and `quota`.
"""
