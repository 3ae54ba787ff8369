"""What is assumed where sizes depend on data that nobody computed, as the user chooses it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from vramfit.arguments import shown
from vramfit.errors import UsageError


class Assume(Enum):
    """How a size is chosen that depends on data."""

    UPPER = "upper"
    """The most that it could be: every element selected, every value distinct."""
    TYPICAL = "typical"
    """What is to be expected: shares that follow from how a mask was made, else half of the elements."""


_IMBALANCE = "imbalance"


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumptions:
    """What ``--assume`` states.

    Attributes:
        sizes: how sizes are chosen.
        imbalance: tokens that a rank of experts receives over its even share of all ranks' tokens; None where nothing
            is stated, and the even share is taken.
    """

    sizes: Assume = Assume.UPPER
    imbalance: float | None = None

    @property
    def text(self) -> str:
        """As it is written: ``upper``, ``typical,imbalance=2``."""
        return self.sizes.value + ("" if self.imbalance is None else f",{_IMBALANCE}={self.imbalance:g}")


def assumption(value: str | Assume | Assumptions) -> Assumptions:
    """What ``--assume`` states: ``upper`` or ``typical``, ``imbalance=K``, or both with a comma between.

    >>> assumption("typical,imbalance=2").imbalance
    2.0

    Raises:
        UsageError: nothing of that kind can be assumed.
    """
    if isinstance(value, Assumptions):
        return value
    if isinstance(value, Assume):
        return Assumptions(sizes=value)
    sizes: Assume | None = None
    imbalance: float | None = None
    for part in value.split(",") if isinstance(value, str) else [shown(value)]:
        name, equals, number = part.strip().partition("=")
        if not equals and sizes is None and name in [one.value for one in Assume]:
            sizes = Assume(name)
        elif equals and name == _IMBALANCE and imbalance is None:
            imbalance = _factor(number)
        else:
            raise UsageError(
                f"nothing can be assumed as {shown(value)}",
                "Choose upper or typical, and imbalance=2 for experts",
            )
    return Assumptions(sizes=sizes or Assume.UPPER, imbalance=imbalance)


def _factor(text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 1 <= factor < math.inf:
        raise UsageError(
            f"the worst rank cannot receive {text} times its even share of tokens",
            "Write a number of at least 1: --assume imbalance=1.5",
        )
    return factor
