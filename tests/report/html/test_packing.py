import json
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramfit.errors import TraceFormatError
from vramfit.report.html.columns import Column, pack, to_text


def unpack(block: bytes) -> tuple[dict[str, list[int]], dict[str, object]]:
    """What decode.js does, in Python."""
    data = zlib.decompress(block)
    length = int.from_bytes(data[:4], "little")
    header = json.loads(data[4 : 4 + length])
    columns, offset = {}, 4 + length
    for name, count, width, rising in header["columns"]:
        planes = np.frombuffer(data[offset : offset + count * width], dtype=np.uint8).reshape(width, count)
        values = sum(planes[at].astype(np.int64) << (8 * at) for at in range(width))
        columns[name] = (np.cumsum(values) if rising else values).tolist()
        offset += count * width
    assert offset == len(data)
    return columns, header["facts"]


@given(st.lists(st.integers(0, (1 << 53) - 1)), st.lists(st.integers(0, 1 << 40)))
def test_columns_come_back_as_they_were(plain: list[int], rising: list[int]) -> None:
    ordered = sorted(rising)
    block = pack(
        {
            "plain": Column(values=np.array(plain, dtype=np.int64)),
            "rising": Column(values=np.array(ordered, dtype=np.int64), rising=True),
        },
        {"name": "</script> é"},
    )
    columns, facts = unpack(block)
    assert columns == {"plain": plain, "rising": ordered}
    assert facts == {"name": "</script> é"}


@pytest.mark.parametrize("number", [-1, 1 << 53])
def test_numbers_that_a_page_cannot_hold_are_refused(number: int) -> None:
    with pytest.raises(TraceFormatError, match="column sizes"):
        pack({"sizes": Column(values=np.array([1, number]))}, {})


def test_a_column_that_falls_is_no_rising_one() -> None:
    with pytest.raises(TraceFormatError, match="column rows"):
        pack({"rows": Column(values=np.array([2, 1]), rising=True)}, {})


def test_the_text_needs_no_escaping() -> None:
    text = to_text(pack({}, {"name": "</script><!--"}))
    assert set(text) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=")
