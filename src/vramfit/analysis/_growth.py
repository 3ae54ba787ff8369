"""Whether what each step holds grows from one to the next, by the levels of the whole device alone.

NOTE [How many steps tell a leak]
One rise tells nothing, and neither do two: the first step lacks what an optimizer keeps, and the second may begin with
what the first left in the loop's variables. With six levels after the warm-up the tests of `vramfit.analysis.trend`
decide, as they do for `explain`. With fewer, growth is called where three changes in a row, the last ones, are rises of
like size: the largest at most twice the smallest. Else what was seen is reported without a claim.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from vramfit.analysis._lifetimes import Ints
from vramfit.analysis._phases import Phase
from vramfit.analysis.trend import fading_p_value, growth_p_value, late_share, theil_sen
from vramfit.units import MIB

ALPHA = 0.01
"""Chance of calling growth where there is none, for a whole trace."""

LEAST_LEVELS = 6  # 1/6! is below half of ALPHA, 1/5! is not
"""Fewest levels after the warm-up that distinguish growth from chance."""

_FADING = 0.01
_LATE_SHARE = 0.5
_PAIRED = 120
"""Levels that are tested: of more, some are taken evenly, since pairs of them are compared."""
_RISES = 3
"""Fewest rises of like size that are called growth."""
_NOTABLE = 100
"""A last rise is worth a sentence from this part of the level on, a hundredth: a metric or a counter is not."""
_ALIKE = 2
"""How many times as large as the smallest the largest of them may be."""


class GrowthEvidence(Enum):
    """What the levels of the steps show."""

    NONE = "none"
    """They do not grow."""
    TOO_FEW_STEPS = "too few steps"
    """They rose, too rarely to tell a leak."""
    SIMILAR_RISES = "similar rises"
    """Three rises in a row or more, of like size, up to the last step."""
    TESTED = "tested"
    """They grow beyond chance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """What the iterations leave behind.

    What is alive at the end of an iteration tells no growth: gradients that each iteration drops at its start are
    still there at the end of the last one. What counts is the low-water mark: the bytes that an iteration holds at
    every moment of it.

    Attributes:
        iterations: their numbers.
        end_allocated: bytes at the end of each.
        least_allocated: the fewest bytes during each.
        per_iteration: the change of these from one iteration to the next, as the median slope over all pairs, so that
            what is left at every second iteration counts by half; leaving out the first two
            iterations, in which optimizer state, gradients and workspaces come into being, and the last one where it
            holds less than the one before; None with fewer than four.
        evidence: whether that is growth.
        rises: how often in a row the level rose up to the last iteration, the first one left out.
        last_rise: bytes of the last of them, 0 without any.
    """

    iterations: tuple[int, ...]
    end_allocated: tuple[int, ...]
    least_allocated: tuple[int, ...]
    per_iteration: int | None
    evidence: GrowthEvidence
    rises: int = 0
    last_rise: int = 0

    @property
    def is_leak(self) -> bool:
        """Whether it goes on from iteration to iteration, by a MiB at least."""
        called = self.evidence in (GrowthEvidence.SIMILAR_RISES, GrowthEvidence.TESTED)
        return called and self.per_iteration is not None and self.per_iteration >= MIB

    @property
    def is_suspected(self) -> bool:
        """Whether memory rose notably up to the end, by a MiB at least, in too few iterations to tell a leak."""
        notable = max(MIB, max(self.least_allocated, default=0) // _NOTABLE)
        return self.evidence is GrowthEvidence.TOO_FEW_STEPS and self.last_rise >= notable


NO_GROWTH = Growth(
    iterations=(), end_allocated=(), least_allocated=(), per_iteration=None, evidence=GrowthEvidence.NONE
)
"""Of a program without iterations."""


def growth(all_phases: tuple[Phase, ...]) -> Growth:
    """What each iteration leaves behind. A leak shows as a steady positive change."""
    last_of: dict[int, Phase] = {}
    least: dict[int, int] = {}
    for phase in all_phases:
        if phase.iteration is not None:
            least[phase.iteration] = min(
                phase.least_allocated, least.get(phase.iteration, phase.least_allocated)
            )
            before = last_of.get(phase.iteration)
            if before is None or phase.last_row > before.last_row:
                last_of[phase.iteration] = phase
    ordered = sorted(last_of.items())
    levels = tuple(least[number] for number, _ in ordered)
    usable = levels
    if len(levels) > 3 and levels[-1] < levels[-2]:
        usable = levels[:-1]  # the end of the training lets go of much, whatever comes after it
    evidence, rises = _evidence(usable)
    settled = usable[2:]
    return Growth(
        iterations=tuple(number for number, _ in ordered),
        end_allocated=tuple(phase.end_allocated for _, phase in ordered),
        least_allocated=levels,
        per_iteration=_slope(settled) if len(settled) > 1 else None,
        evidence=evidence,
        rises=len(rises),
        last_rise=rises[-1] if rises else 0,
    )


def _evidence(levels: Sequence[int]) -> tuple[GrowthEvidence, list[int]]:
    """What levels show, and the rises in a row with which they end. See NOTE [How many steps tell a leak]."""
    changes = [later - earlier for earlier, later in itertools.pairwise(levels[1:])]
    rises = [*itertools.takewhile(lambda change: change > 0, reversed(changes))][::-1]
    thinned = np.asarray(levels)[_places(len(levels))]
    start = warmup_of(len(thinned))
    if len(thinned) - start >= LEAST_LEVELS:
        grows = growth_p_value(thinned[start:]) <= ALPHA / 2 and goes_on(thinned, start)
        return (GrowthEvidence.TESTED if grows else GrowthEvidence.NONE), rises
    settled = rises[-(len(levels) - 3) :] if len(levels) > 3 else []
    if len(settled) >= _RISES and max(settled) <= _ALIKE * min(settled):
        return GrowthEvidence.SIMILAR_RISES, rises
    return (GrowthEvidence.TOO_FEW_STEPS if rises else GrowthEvidence.NONE), rises


def goes_on(levels: Ints, warmup: int) -> bool:
    """Whether growth lasts to the end: see NOTE [How a leak is told] in _leaks.py, 4."""
    window, before = levels[warmup:], int(levels[:warmup].max(initial=0))
    return late_share(window) >= _LATE_SHARE and fading_p_value(window) > _FADING and int(window[-1]) > before


def warmup_of(count: int) -> int:
    """How many of ``count`` levels to leave out: see NOTE [How a leak is told] in _leaks.py, 2."""
    return max(1, min(count // 3, count - LEAST_LEVELS)) if count > 1 else 0


def _places(count: int) -> Ints:
    """Of so many levels those that are compared in pairs."""
    return (
        np.unique(np.linspace(0, count - 1, min(count, _PAIRED)).astype(np.int64)) if count else np.arange(0)
    )


def _slope(levels: Sequence[int]) -> int:
    """Bytes by which levels change from one to the next."""
    places = _places(len(levels))
    return round(theil_sen(np.asarray(levels)[places], places))
