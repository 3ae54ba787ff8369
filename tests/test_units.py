"""Sizes in text."""

import pytest

from vramfit.units import GIB, MIB, format_bytes, is_size, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 * GIB),
        ("24 GB", 24 * 10**9),
        ("24G", 24 * GIB),
        ("1_000B", 1000),
        ("0", 0),
        (" 0.0 ", 0),
        (1000, 1000),
        (2.5e9, 2_500_000_000),
        ("1e3 bytes", 1000),
        ("0.5k", 512),
    ],
)
def test_sizes_are_read(text: str | float, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1e-3GiB", "12 stones", "1,5GiB", "inf"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["16", " 24 ", "1_000", "1.5", "1e9"])
def test_a_number_without_a_unit_is_asked_about(text: str) -> None:
    number = text.strip()
    with pytest.raises(ValueError, match="has no unit") as asked:
        parse_bytes(text)
    meant = f"{number}B for bytes" if float(number) >= MIB else f"{number}GiB, or {number}B for bytes"
    assert str(asked.value) == f"{number} has no unit: write {meant}"
    assert parse_bytes(f"{number}B") == round(float(number.replace("_", "")))


@pytest.mark.parametrize("text", ["1e400B", "1e400GiB", "1e300TiB", "8388608TiB", f"{2**63}B"])
def test_what_is_larger_than_any_memory(text: str) -> None:
    with pytest.raises(ValueError, match="larger than any memory"):
        parse_bytes(text)


def test_sizes_are_written_as_they_are_read() -> None:
    assert format_bytes(parse_bytes("1.5GiB")) == "1.50 GiB"
    assert is_size("24GiB")
    assert not is_size("24")
