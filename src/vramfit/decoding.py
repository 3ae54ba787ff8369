"""Values read from files, as the types that they should have: by msgspec, with errors that say what to write."""

from __future__ import annotations

import re
import typing
from enum import Enum
from typing import Any

import msgspec

from vramfit.errors import UsageError

_NAMES = {"array": "list", "object": "table"}
"""What TOML calls the types that msgspec names as JSON does."""


def decode(value: Any, kind: Any, what: str) -> Any:
    """A value of TOML or JSON as another type: an enum's member, a tuple, a number.

    Args:
        value: as the file's reader gives it.
        kind: the type, as type hints have it.
        what: what errors call the value: ``bits of low-bit-optimizer``.

    Raises:
        UsageError: it is not of that type; the message gives the value and what it should be.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _refusal(value, kind, what, str(error)) from error


def _refusal(value: Any, kind: Any, what: str, reason: str) -> UsageError:
    """The error for a value, from msgspec's ``Expected `int`, got `str` - at `$[0]```."""
    wanted, place = re.match(r"Expected `([^`]+)`", reason), re.search(r"at `\$((?:\[\d+\])+)`", reason)
    for index in re.findall(r"\d+", place[1]) if place else ():
        value = value[int(index)]
    members = next((one for one in (kind, *typing.get_args(kind)) if _is_enum(one)), None)
    if members is not None and (place or not isinstance(value, list | dict)):
        return UsageError(f"{what} is {value!r}", f"Give one of {', '.join(str(m.value) for m in members)}")
    name = wanted[1].removesuffix(" | null") if wanted else str(kind)
    return UsageError(f"{what} is {value!r}", f"It has to be of type {_NAMES.get(name, name)}")


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)
