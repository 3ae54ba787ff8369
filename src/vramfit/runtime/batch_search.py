"""Trials of batch sizes, and how the largest that fits is looked for: near a prediction, and by measured peaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vramfit.searching.allowed import Multiples
from vramfit.searching.largest import NEIGHBOURS_FIRST, LargestSearch, MeasuredLine, Strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchTrial:
    """Some steps at one size.

    Attributes:
        size: of the batch.
        fits: whether all steps ended, on all ranks.
        peak_bytes: that torch reserved at the highest; 0 where that is not known.
    """

    size: int
    fits: bool
    peak_bytes: int = 0


def batch_search(
    run: Callable[[int], BatchTrial], *, start: int, most: int, predicted: bool, limit_bytes: int = 0
) -> LargestSearch[BatchTrial]:
    """The search for the largest size.

    Args:
        run: tries a size.
        start: where to begin.
        most: the largest size that is of use.
        predicted: whether `start` is a prediction.
        limit_bytes: that torch may reserve; 0 where that is not known.
    """
    strategy = Strategy(
        allowed=Multiples(most=most), start=start, steps=NEIGHBOURS_FIRST if predicted else ()
    )
    line: MeasuredLine[BatchTrial] = MeasuredLine(measured=lambda trial: trial.peak_bytes, limit=limit_bytes)
    return LargestSearch(run, lambda trial: trial.fits, strategy, line=line)
