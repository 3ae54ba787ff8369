"""Settings of techniques: as dataclasses, as what TOML and JSON can hold, and in words."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeVar

from vramfit.errors import UsageError

S = TypeVar("S")


def setting_to_plain(setting: Any) -> dict[str, Any]:
    """A setting as what TOML and JSON can hold; defaults are left out."""
    plain = {}
    for field in dataclasses.fields(setting):
        value = getattr(setting, field.name)
        if value != _default(field):
            plain[field.name] = _as_plain(value)
    return plain


def describe_setting(setting: Any) -> str:
    """A setting in words, for tables: what is not the default, as ``name value``."""
    changed = setting_to_plain(setting)
    return ", ".join(f"{name.replace('_', ' ')} {_words(value)}" for name, value in changed.items())


def read_setting(technique: str, kind: type[S], plain: Mapping[str, Any]) -> S:
    """A setting of a technique from what TOML and JSON can hold.

    Args:
        technique: the technique's name, for errors.
        kind: the dataclass of its settings.
        plain: values by the names of its fields.

    Raises:
        UsageError: a name is unknown, a value is not one of those possible, or one is missing.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(plain) - set(fields))
    if unknown:
        raise UsageError(
            f"{technique} has no setting {unknown[0]!r}", f"It has {', '.join(fields) or 'none'}"
        )
    hints = typing.get_type_hints(kind)
    values = {name: _read(technique, name, value, hints[name]) for name, value in plain.items()}
    try:
        return kind(**values)
    except TypeError as error:
        missing = [n for n, f in fields.items() if _default(f) is dataclasses.MISSING and n not in values]
        if not missing:
            raise
        raise UsageError(f"{technique} needs the setting {missing[0]!r}", "Give it") from error


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _as_plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [_as_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _as_plain(item) for key, item in value.items()}
    return value


def _words(plain: Any) -> str:
    if isinstance(plain, list):
        shown = ", ".join(map(str, plain[:3]))
        return shown if len(plain) <= 3 else f"{shown} and {len(plain) - 3} more"
    return str(plain)


def _read(technique: str, name: str, value: Any, kind: Any) -> Any:
    """A plain value as the type that a setting's field has."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        parts = [part for part in typing.get_args(kind) if part is not type(None)]
        return _read(technique, name, value, parts[0])
    if origin is tuple and isinstance(value, list | tuple):
        of = typing.get_args(kind)[0]
        return tuple(_read(technique, name, item, of) for item in value)
    if isinstance(kind, type) and issubclass(kind, Enum):
        try:
            return kind(value)
        except ValueError:
            known = ", ".join(str(member.value) for member in kind)
            raise UsageError(f"{name} of {technique} is {value!r}", f"Give one of {known}") from None
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is float and not math.isfinite(value):
        raise UsageError(f"{name} of {technique} is {value}", "Give a number")
    if isinstance(kind, type) and type(value) is kind:
        return value
    if (
        origin is not None
        and isinstance(origin, type)
        and isinstance(value, Mapping)
        and issubclass(origin, Mapping)
    ):
        of = typing.get_args(kind)[1]
        return {str(key): _read(technique, name, item, of) for key, item in value.items()}
    wanted = kind.__name__ if isinstance(kind, type) else str(kind)
    raise UsageError(f"{name} of {technique} is {value!r}", f"It has to be of type {wanted}")
