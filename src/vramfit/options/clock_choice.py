"""Which clock a program reads on a virtual card. No torch."""

from __future__ import annotations

from enum import Enum

from vramfit.errors import UsageError


class ProgramClock(Enum):
    """What Python's clocks follow where the program reads them."""

    REAL = "real"
    SIMULATED = "simulated"


CLOCK_NAMES = tuple(one.value for one in ProgramClock)


def program_clock(given: str | ProgramClock) -> ProgramClock:
    """The clock of that name.

    Raises:
        UsageError: no clock has that name.
    """
    try:
        return ProgramClock(given)
    except ValueError:
        raise UsageError(f"clock={given!r} is no clock", f"Use {' or '.join(CLOCK_NAMES)}") from None
