"""Settings of techniques: as dataclasses, as what TOML and JSON can hold, and in words."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeVar

from vramfit.errors import UsageError
from vramfit.plain import decode

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
    for name, value in plain.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{name} of {technique} is {value}", "Give a number")
    hints = typing.get_type_hints(kind)
    values = {name: decode(value, hints[name], f"{name} of {technique}") for name, value in plain.items()}
    for name, field in fields.items():
        if name not in values and _default(field) is dataclasses.MISSING:
            raise UsageError(f"{technique} needs the setting {name!r}", "Give it")
    return kind(**values)


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
