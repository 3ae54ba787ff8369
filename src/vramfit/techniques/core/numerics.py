"""What a technique may change in a program's results, in four levels."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import total_ordering

from vramfit.errors import UsageError


@total_ordering
class Numerics(Enum):
    """How far results may differ from the plain program's, from the strictest level on.

    Attributes:
        BITWISE: every value and every gradient is the same, bit for bit.
        ROUNDING: the same mathematics in the same precision, summed in another order.
        PRECISION: fewer bits somewhere: bfloat16, tf32, states of an optimizer in 8 bits.
        APPROXIMATE: other mathematics: compressed activations, projected gradients, another optimizer.
    """

    BITWISE = "bitwise"
    ROUNDING = "rounding"
    PRECISION = "precision"
    APPROXIMATE = "approximate"

    def __lt__(self, other: Numerics) -> bool:
        """Whether this level promises more than the other."""
        order = list(Numerics)
        return order.index(self) < order.index(other)

    @classmethod
    def parse(cls, text: str) -> Numerics:
        """The level of that name.

        Raises:
            UsageError: there is none.
        """
        try:
            return cls(text.strip().lower())
        except ValueError:
            names = ", ".join(level.value for level in cls)
            raise UsageError(f"{text!r} is no level of numerics", f"Give one of {names}") from None


@dataclass(frozen=True, slots=True)
class Promise:
    """What one setting of a technique promises of the results.

    Attributes:
        numerics: the level.
        note: what exactly may differ, in one sentence without a full stop; empty where nothing does.
    """

    numerics: Numerics
    note: str = ""
