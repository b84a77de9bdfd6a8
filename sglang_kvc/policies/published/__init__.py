"""Methods as their papers describe them: LeanKV, H2O, SnapKV, KV-Compress, DefensiveKV, LazyEviction, CompressKV, ARKV,
and presets named after papers.

They are available but not recommended. They keep tokens by the attention scores of the request that fills a block, but
later requests with the same prefix need other tokens. docs/quality-research.md compares them with `quantize` and
`quota`.
"""
