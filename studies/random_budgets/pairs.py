"""Pairs of a workload and a budget, drawn at random: the same seed and number always give the same pair."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from random_budgets.workloads import ARCHITECTURES, workload_of
from vramfit import Workload

LEAST_PART, MOST_PART = 0.03, 0.97
"""Where between the low and the plain peak a budget may lie."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A workload, and where its budget lies.

    Attributes:
        seed, number: what it was drawn from.
        architecture: name of its kind of model.
        shape: sizes of the model.
        sizes: of the batch.
        numerics: how far results may differ: ``bitwise`` or ``rounding``.
        part: of the way from the low peak to that of the plain program.
    """

    seed: int
    number: int
    architecture: str
    shape: Mapping[str, int]
    sizes: Mapping[str, int]
    numerics: str
    part: float

    @property
    def workload(self) -> Workload:
        """It, plain."""
        return workload_of(self.architecture, self.shape, self.sizes)

    def budget(self, low: int, plain: int) -> int:
        """The budget in bytes, from both peaks."""
        return low + round(self.part * (plain - low))


def draw(seed: int, number: int) -> Pair:
    """The pair of this number; architectures take turns, all else is drawn."""
    names = list(ARCHITECTURES)
    name = names[number % len(names)]
    architecture = ARCHITECTURES[name]
    dice = random.Random(f"{seed} {number}")
    return Pair(
        seed=seed,
        number=number,
        architecture=name,
        shape={size: dice.choice(values) for size, values in architecture.shape.items()},
        sizes={size: dice.choice(values) for size, values in architecture.sizes.items()},
        numerics=dice.choice(("bitwise", "rounding")),
        part=dice.uniform(LEAST_PART, MOST_PART),
    )
