"""Bytes as int inside, "24GiB" parsed once at the edge, GiB and MiB in text."""

from __future__ import annotations

import operator
import re

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

_FACTORS: dict[str, int] = dict.fromkeys(("", "b", "byte", "bytes"), 1) | {
    letter + ending: base**power
    for power, letter in enumerate("kmgt", start=1)
    for ending, base in (("", 1 << 10), ("ib", 1 << 10), ("b", 10**3))
}
_TOO_LARGE = 2**63
"""Bytes that no signed 64-bit number holds."""
_PATTERN = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:e[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(text: str | float) -> int:
    """Parse a size in bytes: ``24GiB`` is 24 x 2^30, ``24GB`` is 24 x 10^9, ``512B`` is 512 bytes.

    A bare letter (``24G``) is binary, as in the tools that print it (``nvidia-smi``, ``free -h``). Text needs a unit,
    except for zero. A number is one of bytes, and whole: ``2.5e9`` is.

    Raises:
        ValueError: the text is not a size, lacks a unit, or names more than memory can have; the message says what is
            accepted. True, None and whatever else is neither text nor a number are refused too.
    """
    if not isinstance(text, str):
        return _whole_bytes(text)
    match = _PATTERN.fullmatch(text)
    factor = _FACTORS.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is not a size: write it as 24GiB, 24GB, 512MiB or 512B")
    number = match.group(1)
    size = float(number.replace("_", "")) * factor
    if size and not match.group(2):
        meant = f"{number}B for bytes" if size >= MIB else f"{number}GiB, or {number}B for bytes"
        raise ValueError(f"{text.strip()} has no unit: write {meant}")
    if size >= _TOO_LARGE:
        raise ValueError(f"{text!r} is larger than any memory")
    return round(size)


def _whole_bytes(number: object) -> int:
    """A number of bytes that is given as one."""
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    try:
        found = None if isinstance(number, bool) else operator.index(number)  # type: ignore[arg-type]
    except TypeError:
        found = None
    if found is None:
        raise ValueError("it is not a size: write it as 24GiB, 24GB, 512MiB or a whole number of bytes")
    if abs(found) >= _TOO_LARGE:
        raise ValueError("it is larger than any memory")
    return found


def is_size(text: str) -> bool:
    """Whether ``text`` is a size with a unit, such as ``24GiB``: a plain number or a name is not."""
    match = _PATTERN.fullmatch(text)
    return bool(match and match.group(2) and match.group(2).lower() in _FACTORS)


def format_bytes(count: float) -> str:
    """Write a number of bytes with a binary unit: ``1.50 GiB``, ``512 B``; the sign is kept."""
    sign = "-" if count < 0 else ""
    size = abs(count)
    for unit, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size >= factor:
            return f"{sign}{size / factor:.2f} {unit}"
    return f"{sign}{size:.0f} B"


def counted(count: int, what: str) -> str:
    """A number of things: ``1 block``, ``2,000 blocks``."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"
