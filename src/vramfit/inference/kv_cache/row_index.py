"""Where tokens are: for each row and column of a batch the row of its block, and the same on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from vramfit.inference.kv_cache.block_store import BlockTensors
from vramfit.inference.kv_cache.sequences import GONE, TokenSequence, TokenSlot

STEP_COLUMNS = 256
"""A table on the host grows by so many columns at once."""


class RowIndex:
    """For each row and column of the batch the first of the token's rows in the store.

    Columns without a token (padding, rows that are finished, what has left a window) point at the store's first row: it
    holds finite numbers, which the mask hides.
    """

    def __init__(self) -> None:
        self._first: npt.NDArray[np.int32] = np.zeros((0, 0), dtype=np.int32)
        self._on_device: tuple[tuple[int, int, int], torch.Tensor] | None = None

    def grow(self, batch: int, width: int) -> None:
        """Make room for a batch of so many rows and columns."""
        self._on_device = None
        rows, columns = self._first.shape
        if rows != batch or columns < width:
            larger = np.zeros((batch, -(-width // STEP_COLUMNS) * STEP_COLUMNS), dtype=np.int32)
            if rows == batch:
                larger[:, :columns] = self._first
            self._first = larger

    def add(self, slots: Sequence[TokenSlot], store: BlockTensors) -> None:
        """Note where new tokens are."""
        if slots:
            rows, columns, blocks, offsets = np.array(slots, dtype=np.int64).T
            self._first[rows, columns] = blocks * store.form.rows + offsets * store.form.shape.heads

    def move(self, row: int, source: int, target: int, block_rows: int) -> None:
        """A row's tokens of one block are in another now."""
        here = self._first[row]
        here[here // block_rows == source] += (target - source) * block_rows

    def take(self, chosen: Sequence[int]) -> None:
        """Make these rows the batch."""
        self._first = self._first[list(chosen)]
        self._on_device = None

    def clear(self, row: int) -> None:
        """A row has no tokens any more."""
        self._first[row] = 0
        self._on_device = None

    def changed(self) -> None:
        """What is on the device is no longer true."""
        self._on_device = None

    def rebuild(
        self, rows: Sequence[TokenSequence], group: int, width: int, store: BlockTensors, size: int
    ) -> None:
        """Note all tokens of other sequences."""
        self._first = np.zeros((0, 0), dtype=np.int32)
        self.grow(len(rows), width)
        for number, row in enumerate(rows):
            for place, block in enumerate(row.tables[group]):
                for offset, column in enumerate(row.columns[place * size : (place + 1) * size]):
                    if block != GONE:
                        self._first[number, column] = store.first_row(block, offset)

    def device_rows(
        self,
        begin: int,
        end: int,
        heads: int,
        device: torch.device,
        sinks: Sequence[tuple[int, Sequence[int]]] = (),
    ) -> torch.Tensor:
        """Rows of columns ``[begin, end)`` on the device, int32 ``[batch * heads * columns]``, made once a step.

        Args:
            begin, end: of the columns.
            heads: of keys and values.
            device: where.
            sinks: rows whose first columns here show others.
        """
        key = (begin, end, heads)
        if self._on_device is None or self._on_device[0] != key:
            shown = np.array(self._first[:, begin:end])
            for row, columns in sinks:
                shown[row, : len(columns)] = self._first[row, list(columns)]
            first = torch.from_numpy(shown).to(device)
            lanes = torch.arange(heads, dtype=torch.int32, device=device)
            self._on_device = key, (first[:, None, :] + lanes[None, :, None]).view(-1)
        return self._on_device[1]


class WriteIndex:
    """Where a step writes the states of one group's layers.

    Args:
        slots: of new tokens that are kept.
        store: theirs.
        batch, begin, new: rows, the first new column, and how many are new.
    """

    def __init__(
        self, slots: Sequence[TokenSlot], store: BlockTensors, batch: int, begin: int, new: int
    ) -> None:
        self._whole = len(slots) == batch * new
        heads = store.form.shape.heads
        ordered = sorted(slots)
        first = np.array(
            [slot.block * store.form.rows + slot.offset * heads for slot in ordered], dtype=np.int64
        )
        rows = (first[:, None] + np.arange(heads)).reshape(-1)
        self._rows = torch.from_numpy(rows).to(store.device)
        self._runs = [] if self._whole else list(_runs(ordered, begin))

    def write(self, store: BlockTensors, part: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write states ``[batch, heads, columns, dim]`` into a layer."""
        heads = store.form.shape.heads
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        if self._whole:
            store.write(
                part, self._rows, keys.reshape(-1, keys.shape[-1]), values.reshape(-1, values.shape[-1])
            )
            return
        at = 0
        for row, first, last in self._runs:
            count = (last - first) * heads
            some = [one[row, first:last].reshape(count, one.shape[-1]) for one in (keys, values)]
            store.write(part, self._rows[at : at + count], some[0], some[1])
            at += count


def _runs(slots: Sequence[TokenSlot], begin: int) -> list[tuple[int, int, int]]:
    """Columns of one row that follow each other, counted from the first new one: row, first, and the one after."""
    found: list[tuple[int, int, int]] = []
    for slot in slots:
        column = slot.column - begin
        if found and found[-1][0] == slot.row and found[-1][2] == column:
            found[-1] = (slot.row, found[-1][1], column + 1)
        else:
            found.append((slot.row, column, column + 1))
    return found
