"""Values as the plain ones that JSON and TOML can hold, and back: by msgspec, with errors that name the place."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from enum import Enum
from itertools import repeat
from typing import Any, TypeVar

import msgspec

from vramfit.errors import UsageError

Value = TypeVar("Value")

_MISSING = object()
_NAMES = {tuple: "list", Mapping: "table", dict: "table"}
"""What TOML calls types that Python calls something else."""


def to_plain(value: Any) -> Any:
    """A value, such as a dataclass, as dicts, lists, texts and numbers; enumerations by their values."""
    return _listed(msgspec.to_builtins(value, enc_hook=_known))


def _listed(value: Any) -> Any:
    """Builtin values with lists in place of tuples."""
    if isinstance(value, dict):
        return {key: _listed(item) for key, item in value.items()}
    return [_listed(item) for item in value] if isinstance(value, list | tuple) else value


def _known(value: Any) -> Any:
    """A value of a class that msgspec does not know, as one that it does: torch's version is a kind of text."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no plain form")


def from_plain(values: Any, kind: type[Value]) -> Value:
    """The value that `to_plain` described, from a process or a file of our own.

    Args:
        kind: the type; it may be generic, such as ``tuple[int, ...]``.

    Raises:
        msgspec.ValidationError: they are not of that type.
    """
    return msgspec.convert(values, kind)


class Misfit(ValueError):
    """A value of a file that is not of its type.

    Args:
        place: the keys that lead to it, ``rates.flops.float32``; empty for the value itself.
        kind: the type that it should have.
    """

    def __init__(self, place: str, value: Any, kind: Any) -> None:
        self.place = place
        self.value = value
        self.choices = _choices(kind)
        self.wanted = _meta(kind, "description") or (
            f"one of {', '.join(self.choices)}" if self.choices else f"of type {_name(kind)}"
        )
        super().__init__(
            f"{place} is missing" if value is _MISSING else f"{place} is {value!r:.40}, not {self.wanted}"
        )


def read(value: Any, kind: Any, place: str = "") -> Any:
    """A value of TOML or JSON that people or other programs wrote, as another type.

    Args:
        value: as the file's reader gives it.
        kind: the type, as type hints have it. Errors take their words from a ``Meta(description=...)`` in it; its
            ``title`` names the items of a list.
        place: the keys that led to the value.

    Raises:
        Misfit: it is not of that type.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _misfit(value, kind, place, str(error)) from None


def decode(value: Any, kind: Any, what: str) -> Any:
    """`read`, for a value that has a name of its own.

    Args:
        value: as the file's reader gives it.
        kind: the type, as type hints have it.
        what: what errors call the value: ``bits of low-bit-optimizer``.

    Raises:
        UsageError: it is not of that type; the message gives the value and what it should be.
    """
    try:
        return read(value, kind)
    except Misfit as misfit:
        wanted = f"It has to be {misfit.wanted}"
        if misfit.value is _MISSING:
            raise UsageError(f"{what} has no {misfit.place}", "Give it") from None
        if misfit.place:
            raise UsageError(f"{what} is {value!r}", f"{wanted} at {misfit.place}") from None
        if misfit.choices:
            wanted = f"Give one of {', '.join(misfit.choices)}"
        raise UsageError(f"{what} is {misfit.value!r}", wanted) from None


def _misfit(value: Any, kind: Any, place: str, reason: str) -> Misfit:
    """The innermost part of a refused value that is refused by itself: msgspec names no keys of tables."""
    for part, inner, name in _parts(value, kind):
        try:
            msgspec.convert(part, inner)
        except msgspec.ValidationError as error:
            return _misfit(part, inner, f"{place}{'.' * bool(place and name)}{name}", str(error))
    missing = re.match(r"Object missing required field `(.+?)`", reason)
    if missing:
        return Misfit(f"{place}{'.' * bool(place)}{missing[1]}", _MISSING, kind)
    title = _meta(kind, "title")
    return Misfit(f"{place}: {title}" if title else place, value, kind)


def _parts(value: Any, kind: Any) -> Iterator[tuple[Any, Any, str]]:
    """What a table or a list holds, each with its type and with its key if it has one."""
    kind = _bare(kind)
    inner = typing.get_args(kind)
    if isinstance(value, dict) and typing.get_origin(kind) in _NAMES:
        yield from ((item, inner[-1], key) for key, item in value.items())
    elif isinstance(value, dict) and isinstance(kind, type):
        hints = typing.get_type_hints(kind, include_extras=True)
        yield from ((item, hints[key], key) for key, item in value.items() if key in hints)
    elif isinstance(value, list) and typing.get_origin(kind) in (tuple, list):
        same = Ellipsis in inner or typing.get_origin(kind) is list
        yield from zip(value, repeat(inner[0]) if same else inner, repeat(""), strict=False)


def _bare(kind: Any) -> Any:
    """A type without what is annotated, and without the None that may take its place."""
    if typing.get_origin(kind) is typing.Annotated:
        return _bare(kind.__origin__)
    members = _members(kind)
    return _bare(members[0]) if members != [kind] and len(members) == 1 else kind


def _members(kind: Any) -> list[Any]:
    """The types that a union is of, without None; any other type by itself."""
    union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return [one for one in typing.get_args(kind) if one is not types.NoneType] if union else [kind]


def _meta(kind: Any, name: str) -> str | None:
    """A word of the ``Meta`` that is annotated to a type, None without one."""
    return next(
        (getattr(meta, name) for one in _members(kind) for meta in getattr(one, "__metadata__", ())), None
    )


def _choices(kind: Any) -> list[str]:
    """The values that an enumeration's members have, none for other types."""
    kind = _bare(kind)
    return [str(one.value) for one in kind] if isinstance(kind, type) and issubclass(kind, Enum) else []


def _name(kind: Any) -> str:
    kind = _bare(kind)
    kind = Mapping if is_dataclass(kind) else typing.get_origin(kind) or kind
    return _NAMES.get(kind) or str(getattr(kind, "__name__", kind))
