"""Recurrence words: the last important query of a token and the longest interval between two, in a 32-bit score.

    bit 30          1, which keeps every word a normal fp32 number: copies as fp32 do not change it
    bits 12 to 29   last: 1 + position of the last query that paid the token important attention, at most `LATEST`
    bits 0 to 11    interval: the longest distance between two such queries, in tokens, at most `LONGEST`

0 is the word of a token that no query found important. Beyond `LATEST`, time stands still.
"""

from __future__ import annotations

import torch

INTERVAL_BITS = 12
LONGEST = (1 << INTERVAL_BITS) - 1
LATEST = (127 << 11) - 1  # a larger number would set all bits of the fp32 exponent, which spells infinity or NaN
SEEN = 1 << 30


def recurred(words: torch.Tensor, last: torch.Tensor, timed: bool) -> torch.Tensor:
    """Words fp32 after important attention from a query at position `last` - 1 (fp32, 0: none).

    `timed`: the distance to the query before counts as an interval.
    """
    bits, last = words.contiguous().view(torch.int32), last.int().clamp(max=LATEST)
    before, interval = bits >> INTERVAL_BITS & (1 << 18) - 1, bits & LONGEST
    if timed:
        distance = (last - before).clamp(max=LONGEST)
        interval = torch.where(bits != 0, torch.maximum(interval, distance), 0)
    after = SEEN | torch.maximum(before, last) << INTERVAL_BITS | interval
    return torch.where(last > 0, after, bits).view(torch.float32)


def recurrence(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`last` and `interval` of recurrence words, fp32 in the shape of `words`; both 0 for the word 0."""
    bits = words.contiguous().view(torch.int32)
    return (bits >> INTERVAL_BITS & (1 << 18) - 1).float(), (bits & LONGEST).float()
