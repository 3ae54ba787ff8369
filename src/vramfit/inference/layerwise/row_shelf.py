"""Rows of one tensor, kept in the pieces in which they came, and dropped piece by piece."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch

from vramfit.inference.layerwise.chunk_height import ChunkStore


class _Piece(NamedTuple):
    begin: int
    end: int
    rows: torch.Tensor


class RowShelf:
    """Rows of a tensor, a piece after the other.

    Args:
        axis: the dimension of the rows, counted from the last one.
        device: where the rows are read.
        store: where they are kept.
    """

    def __init__(self, axis: int, device: torch.device, store: ChunkStore) -> None:
        self.axis, self.device, self.store = axis, device, store
        self._pieces: deque[_Piece] = deque()

    def put(self, begin: int, rows: torch.Tensor) -> None:
        """Keep rows that follow those that are there."""
        end = begin + rows.shape[self.axis]
        if self.store is ChunkStore.HOST and rows.device.type != "cpu":
            # The stream orders both copies, and the allocator of pinned memory waits for them before it reuses a block.
            kept = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
            rows = kept.copy_(rows, non_blocking=True)
        self._pieces.append(_Piece(begin, end, rows))

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Rows, as a view where one piece has them all.

        Raises:
            AssertionError: some are not there: a reader came back to what it said it had passed.
        """
        found, count = [], 0
        for piece in self._pieces:
            low, high = max(begin, piece.begin), min(end, piece.end)
            if low < high:
                part = piece.rows.narrow(self.axis, low - piece.begin, high - low)
                found.append(part.to(self.device, non_blocking=True))
                count += high - low
        if count != end - begin:
            raise AssertionError(f"rows {begin} to {end} are not there")
        return found[0] if len(found) == 1 else torch.cat(found, self.axis)

    def drop_before(self, row: int) -> None:
        """Let go of pieces that end there or before."""
        while self._pieces and self._pieces[0].end <= row:
            self._pieces.popleft()

    def pop_into(self, whole: torch.Tensor) -> None:
        """Copy every piece to its rows of a whole tensor, and let go of it."""
        while self._pieces:
            piece = self._pieces.popleft()
            whole.narrow(self.axis, piece.begin, piece.end - piece.begin).copy_(piece.rows)
