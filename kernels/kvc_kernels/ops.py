"""The public operations on a `PageStore`.

Operations made by `dispatch` run as kernels on a GPU and as plain torch elsewhere. Their references, and the other
operations, are imported from the operation's folder. Classes are planned operations: `plan` once a forward, then `run`
(or `add`) for each layer. `decode_attention` and `extend_attention` are always the plain-torch references, also on a
GPU. Importing this module does not import triton.

Other packages import only this module, `layout` and `store` (`tests/test_imports.py`).
"""

# ruff: noqa: F401  (this module exports what it imports)

from .append import reference as append_reference
from .common.dispatch import dispatch
from .common.softmax import MAX_ELEMENTS, causal_mask, query_weights
from .compact import reference as compact_reference
from .compact.pack_kept import pack_kept
from .decode import snapshot
from .decode.reference import ReferenceDecode, decode_attention
from .decode.row_gaps import RowGaps
from .extend.fake_quant import fake_quantize
from .extend.reference import ReferenceExtend, extend_attention
from .pages import reference as pages_reference
from .pages.dense import block_digest, block_scores, block_tiers, load_dense
from .pages.reference import block_head_pages, check_invariants
from .pages.tiers import HIGH, LOW, PRUNED, TokenPlaces, token_places
from .records import reference as records_reference
from .scores import reference as scores_reference
from .scores.prompt_end import LastQueries, prompt_scores
from .scores.recurrence import recurrence
from .scores.reference import (
    DECODE_STRIDE,
    STRIDES,
    ReferenceScores,
    ScoreSampling,
    mean_attention_scores,
    queries_of_tokens,
)
from .tiering import importance, thresholds
from .tiering.apportion import (
    apportion,
    greedy_allocation,
    is_concave,
    least_allocation,
    pyramid,
    retention_curves,
    spread,
)
from .tiering.gates import gate_scores
from .tiering.importance import carry_scores, expected_attention, future_keys, hashed_scores, keydiff, pool_scores
from .tiering.pseudo_queries import pseudo_attention, rotated
from .tiering.quota import keep_all, quota, threshold
from .tiering.sequence_quota import ranked_tokens, sequence_quota
from .tiering.thresholds import Thresholds

# Pages: rows in, blocks taken, packed to lower formats and released.
append = dispatch(append_reference.append, "append.kernel:append_triton")
LayerAppend = dispatch(append_reference.ReferenceAppend, "append.kernel:LayerAppend")
take_bf16 = dispatch(pages_reference.take_bf16, "pages.kernel:take_bf16")
release = dispatch(pages_reference.release, "pages.kernel:release")
compact = dispatch(compact_reference.compact, "compact.launch:compact_triton")

# Records: blocks as bytes outside the pool, and back.
take_stored = dispatch(records_reference.take_stored, "records.kernel:take_stored")
write_records = dispatch(records_reference.write_records, "records.kernel:write_records")
read_records = dispatch(records_reference.read_records, "records.kernel:read_records")

# Attention, and the attention scores that some policies collect.
decode_snapshot = dispatch(snapshot.decode_snapshot, "decode.snapshot_kernel:decode_snapshot_triton")
DecodeAttention = dispatch(ReferenceDecode, "decode.attention:DecodeAttention")
ExtendAttention = dispatch(ReferenceExtend, "extend.attention:ExtendAttention")
WindowedExtend = dispatch(ReferenceExtend, "extend.windowed:WindowedExtend")
AttentionScores = dispatch(ReferenceScores, "scores.prefill_kernel:AttentionScores")
count_queries = dispatch(scores_reference.count_queries, "scores.count_kernel:count_queries_triton")

# Plans of policies.
plan_thresholds = dispatch(thresholds.plan_thresholds, "tiering.thresholds_kernel:plan_thresholds_triton")
keydiff_blocks = dispatch(importance.keydiff_blocks, "tiering.keydiff_kernel:keydiff_blocks")
