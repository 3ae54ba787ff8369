"""Arguments of public functions, checked where they come in: what is wrong, why, and what to write instead."""

from __future__ import annotations

import operator
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from vramfit.errors import UsageError
from vramfit.units import parse_bytes

_SIZES = 'Write it as "2GiB" or in bytes'
LONGEST = 1e9
"""Most of any span, in whatever unit; waits of the standard library overflow a little above."""

_MOST = 80
"""Characters of an argument that an error shows."""


def shown(given: object) -> str:
    """An argument as an error shows it."""
    text = " ".join(repr(given).split())  # of arrays, which are shown in several lines
    return text if len(text) <= _MOST else f"{text[: _MOST - 1]}…"


def size_argument(name: str, given: Any, *, least: int = 1) -> int:
    """A size in bytes.

    Args:
        given: ``"2GiB"`` or a whole number of bytes, also as a float (``2.5e9``).
        least: the smallest size allowed: 1, or 0 where no memory at all makes sense.

    Raises:
        UsageError: it is not one.
    """
    try:
        found = parse_bytes(given)
    except ValueError as error:
        raise UsageError(f"{name}={shown(given)} cannot be read: {error}") from None
    if found < least:
        raise UsageError(f"{name}={shown(given)} leaves no memory at all", _SIZES)
    return found


def whole_argument(name: str, given: Any, *, least: int, most: int | None = None) -> int:
    """A whole number within bounds; True and False do not count.

    Raises:
        UsageError: it is not one, or lies outside.
    """
    try:
        found = operator.index(given)
    except TypeError:
        found = None
    if found is None or isinstance(given, bool) or found < least or (most is not None and found > most):
        bounds = f"from {least} on" if most is None else f"from {least} to {most}"
        raise UsageError(f"{name}={shown(given)} is no whole number {bounds}", "Give another")
    return found


def number_argument(name: str, given: Any, *, least: float, most: float, inside: bool = False) -> float:
    """A number within bounds; True, False and ``nan`` do not count.

    Args:
        given: a whole number or a float.
        least, most: the bounds.
        inside: whether the bounds themselves are excluded.

    Raises:
        UsageError: it is not one, or lies outside.
    """
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    if is_number and (least < given < most if inside else least <= given <= most):
        return float(given)
    bounds = f"between {least:g} and {most:g}" if inside else f"from {least:g} to {most:g}"
    raise UsageError(f"{name}={shown(given)} is no number {bounds}", "Give another")


def text_argument(name: str, given: Any) -> str:
    """A text.

    Raises:
        UsageError: it is something else.
    """
    if not isinstance(given, str):
        raise UsageError(
            f"{name}={shown(given)} is no text", f"Give a str; this is of type {type(given).__name__}"
        )
    return given


def flag_argument(name: str, given: Any) -> bool:
    """True or False, and nothing that only counts as one of them.

    Raises:
        UsageError: it is something else.
    """
    if not isinstance(given, bool):
        raise UsageError(
            f"{name}={shown(given)} is neither True nor False", f"This is of type {type(given).__name__}"
        )
    return given


def names_argument(name: str, given: Any) -> tuple[str, ...]:
    """Several names, in a list, a tuple or a set.

    Raises:
        UsageError: one is not a name, or it is a single text.
    """
    if isinstance(given, str | bytes) or not isinstance(given, Collection):
        raise UsageError(f"{name}={shown(given)} is not a list of names", f'Give one: {name}=["..."]')
    return tuple(text_argument(name, one) for one in given)


def sizes_argument(name: str, given: Any) -> dict[str, int]:
    """Sizes of a batch by their names, each from 1 on.

    Raises:
        UsageError: it is something else.
    """
    if not isinstance(given, Mapping):
        raise UsageError(f"{name}={shown(given)} names no sizes", f'Give a dict: {name}={{"batch_size": 8}}')
    return {
        text_argument(f"a name in {name}", size): whole_argument(f"{name}[{size!r}]", count, least=1)
        for size, count in given.items()
    }


def call_argument(name: str, given: Any) -> Any:
    """A function.

    Raises:
        UsageError: it cannot be called.
    """
    if not callable(given):
        raise UsageError(f"{name}={shown(given)} cannot be called", "Give a function, or leave it out")
    return given


def path_argument(name: str, given: Any) -> str:
    """A path, as a text or as what `os.fspath` takes.

    Raises:
        UsageError: it is something else.
    """
    try:
        found = os.fspath(given)
    except TypeError:
        found = None
    if not isinstance(found, str):
        raise UsageError(
            f"{name}={shown(given)} is no path",
            f"Give a str or a Path; this is of type {type(given).__name__}",
        )
    if "\0" in found:
        raise UsageError(f"{name}={shown(given)} is no path: it holds a null character", "Give another")
    return found


def paths_argument(name: str, given: Any) -> tuple[str, ...]:
    """One path, or several in a list or tuple.

    Raises:
        UsageError: one of them is not a path.
    """
    several = given if isinstance(given, Sequence) and not isinstance(given, str | bytes) else (given,)
    return tuple(path_argument(name, path) for path in several)
