"""Gaps in rows of `req_to_token`: places of a sequence whose tokens were moved into fewer blocks before them."""

from __future__ import annotations

import torch


class RowGaps:
    """A gap for each row: its first block and its number of blocks, int32 `[R, 2]` on the device.

    Attention needs no positions, so a snapshot closes a gap: the request's blocks follow each other, and its length is
    shorter by the gap. `open` and `close` run in the order of the operation queue, so the next owner of a row never
    sees the previous owner's gap.
    """

    def __init__(self, rows: int, device: torch.device):
        self.table = torch.zeros((rows, 2), dtype=torch.int32, device=device)
        self.rows: set[int] = set()  # rows with a gap

    def open(self, row: int, first: int, blocks: int) -> None:
        """Open a gap of `blocks` blocks in a row, from the block at place `first` on."""
        if blocks:
            self.table[row, 0].fill_(first)
            self.table[row, 1].fill_(blocks)
            self.rows.add(row)

    def close(self, row: int) -> None:
        """Forget the gap of a row."""
        self.table[row].fill_(0)
        self.rows.discard(row)

    def reset(self) -> None:
        self.table.zero_()
        self.rows.clear()

    def close_up(self, row_blocks: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Move the blocks after the gaps of `rows[B]` forward in `row_blocks[B, NB]`, in place. Returns the lengths of
        the gaps in blocks, int32 `[B]`."""
        first, blocks = self.table[rows.long()].unbind(1)
        place = torch.arange(row_blocks.shape[1], device=row_blocks.device)
        at = place + torch.where(place >= first[:, None], blocks[:, None], 0)
        row_blocks.copy_(row_blocks.gather(1, at.clamp_(max=row_blocks.shape[1] - 1)))
        return blocks
