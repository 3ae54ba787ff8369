"""How high the chunks of a layer are, and where what is kept of its output lies."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from vramfit.arguments import size_argument, whole_argument
from vramfit.errors import UsageError


class ChunkStore(Enum):
    """Where outputs of layers are kept until their last reader has passed.

    Attributes:
        DEVICE: beside the model.
        HOST: in the host's memory, pinned beside a card: chunks go there as they are made, and come back to be read.
    """

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkHeight:
    """How many rows of its output a layer computes at a time; exactly one of the two is given.

    Attributes:
        rows: rows of the first spatial dimension, the same number in every layer.
        bytes: the most that the larger of a chunk's input and output takes; layers of fewer or shorter rows then take
            more at a time. A row is the least. At most about four such chunks exist at a time beside what is kept.

    Raises:
        UsageError: none or both are given, or one is not a positive whole number.
    """

    rows: int | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        """Check that one is given."""
        if (self.rows is None) == (self.bytes is None):
            raise UsageError("a chunk has a height in rows or in bytes", "Give one of rows and bytes")
        if self.rows is not None:
            whole_argument("rows", self.rows, least=1)
        if self.bytes is not None:
            size_argument("bytes", self.bytes)

    def of(self, row_bytes: int) -> int:
        """Rows of a chunk where one row takes so many bytes."""
        if self.rows is not None:
            return self.rows
        return max(1, (self.bytes or 0) // max(1, row_bytes))
