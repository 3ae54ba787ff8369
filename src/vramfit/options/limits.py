"""How long a program may run before it is ended with a verdict: steps that it makes, or time. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from vramfit.errors import UsageError

STEADY: Literal["steady"] = "steady"
"""In place of a number of steps: until enough in a row have asked for the same memory."""

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
# As many digits as anybody waits for: python refuses to read thousands of them.
_STEPS = re.compile(r"[0-9]{1,18}")
_TIME = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([smh]?)")
_AS_STEPS = "Give a number of steps, such as 3, or steady"
_AS_TIME = "Write it as 90s, 10m or 1h"


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """When to end a program.

    Attributes:
        steps: after so many, None for no limit.
        steady: once enough steps in a row have asked for the same memory.
        seconds: of wall time, None for no limit.
    """

    steps: int | None = None
    steady: bool = False
    seconds: float | None = None


NO_LIMITS = Limits()


def limits_from(steps: str | int | None, time: str | float | None) -> Limits:
    """The limits that a user wrote.

    Args:
        steps: a number, ``"steady"`` or None.
        time: ``"90s"``, ``"10m"``, ``"1h"``, seconds as a number, or None.

    Raises:
        UsageError: one of them cannot be read.
    """
    count, steady = _steps(steps)
    return Limits(steps=count, steady=steady, seconds=None if time is None else _seconds(time))


def _steps(given: str | int | None) -> tuple[int | None, bool]:
    if given is None or given == STEADY:
        return None, given == STEADY
    text = str(given).strip()
    if isinstance(given, bool) or _STEPS.fullmatch(text) is None or int(text) < 1:
        raise UsageError(f"{given!r} is not a number of steps", _AS_STEPS)
    return int(text), False


def _seconds(given: str | float) -> float:
    found = _TIME.fullmatch(str(given).strip())
    if isinstance(given, bool) or found is None or float(found[1]) <= 0:
        raise UsageError(f"{given!r} is not a time limit", _AS_TIME)
    return float(found[1]) * _UNITS[found[2]]
