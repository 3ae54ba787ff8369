"""Which rows of its input an operation reads for rows of its output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt


class RowWindow(Protocol):
    """The rows of an input that output rows are made of."""

    def span(self, begin: int, end: int) -> tuple[int, int]:
        """Input rows, from the first to before the last, for output rows from `begin` to before `end`."""
        ...

    def front(self, row: int) -> int:
        """The first input row that output rows from `row` on read; all rows where there are none."""
        ...


class SameRows:
    """Each row is made of the same row.

    Args:
        rows: of the input; the output may have fewer.
        first: of the input's rows, the one that the output begins with.
        count: rows of the output; None for the rest.
    """

    def __init__(self, rows: int, *, first: int = 0, count: int | None = None) -> None:
        self.rows, self.first = rows, first
        self.count = rows - first if count is None else count

    def span(self, begin: int, end: int) -> tuple[int, int]:
        """The same rows, moved by the first."""
        return begin + self.first, end + self.first

    def front(self, row: int) -> int:
        """The same row, moved by the first."""
        return row + self.first if row < self.count else self.rows


class RowTable:
    """Each row is made of the rows from `first` to `last`, one entry of both for each output row.

    Args:
        rows: of the input; entries beyond its borders are cut to them, and every row reads one at least.
    """

    def __init__(
        self,
        first: Sequence[int] | npt.NDArray[np.int64],
        last: Sequence[int] | npt.NDArray[np.int64],
        rows: int,
    ) -> None:
        self.rows = rows
        self.first = np.clip(np.asarray(first, dtype=np.int64), 0, rows - 1)
        self.last = np.maximum(np.clip(np.asarray(last, dtype=np.int64), 0, rows - 1), self.first)
        self._fronts = np.minimum.accumulate(self.first[::-1])[::-1]

    def span(self, begin: int, end: int) -> tuple[int, int]:
        """From the least of the first rows to the greatest of the last ones."""
        return int(self.first[begin:end].min()), int(self.last[begin:end].max()) + 1

    def front(self, row: int) -> int:
        """The least of the first rows from there on."""
        return int(self._fronts[row]) if row < len(self._fronts) else self.rows


def sliding(rows: int, out: int, *, size: int, stride: int, padding: int) -> RowTable:
    """Windows of `size` input rows, the first one `padding` rows before the input, each `stride` after the other."""
    first = np.arange(out, dtype=np.int64) * stride - padding
    return RowTable(first, first + size - 1, rows)
