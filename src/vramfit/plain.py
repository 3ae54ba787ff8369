"""Dataclasses as the plain values that JSON and TOML can hold, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

Value = TypeVar("Value")


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
    """The value that `to_plain` described.

    Args:
        values: plain values.
        kind: the type; it may be generic, such as ``tuple[int, ...]``.

    Raises:
        msgspec.ValidationError: they are not of that type; the message names the place.
    """
    return msgspec.convert(values, kind)
