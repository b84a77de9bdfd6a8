"""`Req.get_fill_ids`: lets chunks of thinned one-shot prompts end with the prompt's last tokens.

This is SGLang's only source for the tokens of a forward. `KvcRadixCache.checkpoint_into_tree` removes these tokens
again, so that the next chunk begins where they did.
"""

from __future__ import annotations

from .lookup import current
from .registry import hook


def after_get_fill_ids(ids, self):
    from sglang_kvc.adapter.request_limits import budget_of, chunk_tokens, format_id_of
    from sglang_kvc.cache.thinning import probe_tokens

    if (budget := budget_of(self)) is None or (runtime := current()) is None:
        return ids
    tokens = len(self.full_untruncated_fill_ids)
    room = runtime.capacity.one_shot
    segment_blocks = room.segment_blocks(budget, tokens, format_id_of(runtime, self), chunk_tokens(runtime))
    if probe := probe_tokens(segment_blocks or 0, self.prefix_len, self.extend_end, tokens):
        ids[len(ids) - probe :] = self.full_untruncated_fill_ids[tokens - probe :]
    return ids


def register() -> None:
    hook("sglang.srt.managers.schedule_batch.Req.get_fill_ids", "after", "self", after_get_fill_ids)
