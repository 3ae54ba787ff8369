"""The values that a search may try: all, multiples, divisors or a list, each with its position among them."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from vramfit.errors import UsageError


class Allowed(Protocol):
    """Whole numbers in ascending order. A search counts them by position, so that each step is to an allowed one."""

    @property
    def first(self) -> int:
        """Position of the smallest."""

    @property
    def last(self) -> int:
        """Position of the largest; less than `first` where nothing is allowed."""

    def value_at(self, position: int) -> int:
        """The value at a position from `first` to `last`."""

    def position_of(self, value: int) -> int:
        """Position of the largest allowed value up to this one; below `first` without one, perhaps beyond `last`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Multiples:
    """Multiples of a number between two values, both included. A value's position is how often it holds the number.

    Args:
        of: the number, at least 1; with 1 every value is allowed.
        least: the smallest value, at least 1.
        most: the largest.
    """

    most: int
    of: int = 1
    least: int = 1

    def __post_init__(self) -> None:
        """Check both.

        Raises:
            UsageError: one is below 1.
        """
        for name, value in (("of", self.of), ("least", self.least)):
            if value < 1:
                raise UsageError(f"{name} is {value}", "Pass a whole number of at least 1")

    @property
    def first(self) -> int:
        """Position of the smallest."""
        return -(-self.least // self.of)

    @property
    def last(self) -> int:
        """Position of the largest."""
        return self.most // self.of

    def value_at(self, position: int) -> int:
        """The multiple at a position."""
        return position * self.of

    def position_of(self, value: int) -> int:
        """Position of the largest multiple up to a value."""
        return value // self.of


@dataclass(frozen=True, slots=True)
class Listed:
    """These values only.

    Args:
        values: ascending, at least 1, each once.

    Raises:
        UsageError: they are not.
    """

    values: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check their order."""
        if any(value < 1 for value in self.values) or any(low >= high for low, high in pairwise(self.values)):
            raise UsageError(
                f"{self.values} are not ascending whole numbers of at least 1",
                "Sort them, and pass each once",
            )

    @property
    def first(self) -> int:
        """Position of the smallest."""
        return 1

    @property
    def last(self) -> int:
        """Position of the largest."""
        return len(self.values)

    def value_at(self, position: int) -> int:
        """The value at a position."""
        return self.values[position - 1]

    def position_of(self, value: int) -> int:
        """Position of the largest listed value up to one."""
        return bisect_right(self.values, value)


def divisors_of(number: int, *, multiple_of: int = 1) -> Listed:
    """The divisors of a number, of those that are multiples of another.

    >>> divisors_of(48, multiple_of=4).values
    (4, 8, 12, 16, 24, 48)

    Raises:
        UsageError: the number is below 1.
    """
    if number < 1:
        raise UsageError(f"{number} has no divisors to choose from", "Pass a whole number of at least 1")
    low = [value for value in range(1, int(number**0.5) + 1) if number % value == 0]
    both = sorted({*low, *(number // value for value in low)})
    return Listed(tuple(value for value in both if value % multiple_of == 0))
