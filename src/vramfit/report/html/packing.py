"""Columns of integers as few bytes: byte planes of differences, deflated; the page's decode.js reads them.

The form, all of it deflated (zlib): the length of the header (four bytes, little endian), the header (JSON, UTF-8),
then the columns one after the other. The header's ``columns`` lists for each its name, the number of elements, the
number of bytes of one element and whether the elements are differences to the one before. A column holds the lowest
byte of every element, then the next byte of every element, and so on: planes of like bytes deflate far better than
whole numbers.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vramfit.errors import TraceFormatError

_LEVEL = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """Natural numbers below 2^53.

    Attributes:
        values: the numbers.
        rising: they never fall, so that differences are smaller than the numbers themselves.
    """

    values: NDArray[Any]
    rising: bool = False


def pack(columns: Mapping[str, Column], facts: Mapping[str, Any]) -> bytes:
    """Columns and what goes with them as one deflated block.

    Args:
        columns: by name.
        facts: anything that JSON can say; the reader finds it beside the columns.

    Raises:
        TraceFormatError: a column holds a negative number, or one that is not exact as a double.
    """
    described, planes = [], []
    for name, column in columns.items():
        values = np.asarray(column.values).astype(np.int64)
        if column.rising and len(values):
            values = np.diff(values, prepend=0)
        if len(values) and (int(values.min()) < 0 or int(values.max()) >= 1 << 53):
            raise TraceFormatError(
                f"the recording cannot be drawn: its column {name} holds numbers that no GPU has",
                "Record it again, or look at what wrote the file",
            )
        width = max(1, (int(values.max(initial=0)).bit_length() + 7) // 8)
        described.append([name, len(values), width, int(column.rising)])
        whole = values.astype("<i8").view(np.uint8).reshape(-1, 8)
        planes.append(np.ascontiguousarray(whole[:, :width].T).tobytes())
    header = json.dumps({"columns": described, "facts": facts}, separators=(",", ":")).encode()
    return zlib.compress(len(header).to_bytes(4, "little") + header + b"".join(planes), _LEVEL)


def to_text(block: bytes) -> str:
    """A packed block as text that may stand in a page."""
    return base64.b64encode(block).decode("ascii")
