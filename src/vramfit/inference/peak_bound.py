"""What a batch of items of one length takes at its highest: a bound from above, from measured shapes or a function."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog

from vramfit.arguments import number_argument, shown
from vramfit.errors import UsageError

MARGIN = 0.02
"""Part by which a fitted bound lies above the lowest one through the measured shapes: blocks are rounded up to 512
bytes and segments to 2 MiB (c10/cuda/CUDACachingAllocator.cpp), which no smooth function of the shape follows."""


_FOCUS = 4.0
"""How sharply a formula is fitted around its length: shapes of twice the length weigh a sixteenth."""

_Floats: TypeAlias = npt.NDArray[np.float64]


class PeakBound:
    """A bound on the peak of a batch, which grows with what is observed.

    Args:
        predict: bytes for a number of items and a length; it must not fall as either grows.

    Attributes:
        factor: what predictions are multiplied with: 1 until one was too low.
        factors: the same for single lengths, beside it.
    """

    def __init__(self, predict: Callable[[int, int], float]) -> None:
        self._predict = predict
        self.factor = 1.0
        self.factors: dict[int, float] = {}

    @classmethod
    def of(cls, peak: Callable[[int, int], float] | Mapping[tuple[int, int], float]) -> PeakBound:
        """The bound of a function, or of measured shapes.

        Args:
            peak: bytes as a function of items and length, or by pairs of them.
        """
        if isinstance(peak, Mapping):
            return fitted_bound(peak)
        if not callable(peak):
            raise UsageError(
                f"peak is of type {type(peak).__name__}",
                "Give a function of items and length, or a dict of measured bytes by (items, length)",
            )
        return cls(peak)

    def __call__(self, items: int, length: int) -> float:
        """Bytes that a batch takes at most.

        Raises:
            UsageError: what was given as the peak gives no number.
        """
        predicted = self._predict(items, length)
        try:
            found = float(predicted)
        except (TypeError, ValueError):
            found = math.nan
        if math.isnan(found):
            raise UsageError(
                f"peak gives {shown(predicted)} for {items} items of {length} tokens", "Let it give bytes"
            )
        return self.scale(length) * found

    def scale(self, length: int) -> float:
        """What predictions for a length are multiplied with."""
        return self.factor * self.factors.get(length, 1.0)

    def learn(self, items: int, length: int, peak_bytes: float) -> None:
        """Raise the bound for one length where a batch of it takes more than it says."""
        scaled = self(items, length)
        if peak_bytes > scaled > 0:
            self.factors[length] = self.factors.get(length, 1.0) * peak_bytes / scaled

    def observe(self, items: int, length: int, peak_bytes: float) -> None:
        """Raise the bound for all lengths where a batch took more than it says."""
        scaled = self(items, length)
        if peak_bytes > scaled > 0:
            self.factor *= peak_bytes / scaled


@dataclass(frozen=True, slots=True)
class PeakFormula:
    """``base + items * (per_item + per_token * length + per_pair * length**2) + alone * length**2``, in bytes.

    Attributes:
        base: what is there without a batch: weights, workspaces.
        per_item, per_token, per_pair: of the batch's activations; pairs of tokens are scores of attention.
        alone: what a length takes whatever the batch, as a mask or a relative bias does.
    """

    base: float
    per_item: float
    per_token: float
    per_pair: float
    alone: float

    def __call__(self, items: int, length: int) -> float:
        """The bytes."""
        each = self.per_item + self.per_token * length + self.per_pair * length**2
        return self.base + items * each + self.alone * length**2


def fitted_bound(measured: Mapping[tuple[int, int], float], *, margin: float = MARGIN) -> PeakBound:
    """The lowest of formulas with coefficients from 0 on that lie nowhere below what was measured, and a margin.

    A peak is the highest of several moments: where scores are there, or where a feed-forward layer is. So there is a
    formula for each measured length, as tight as can be around it, and the lowest of them counts; each is a bound for
    all measured shapes, and grows with the items and with the length, since no coefficient is negative. A linear
    program finds them: the sum of what a formula lies above, weighted by how near a shape's length is and how large
    its peak. The bound cannot be too low at a measured shape, as a regression is at half of them. Between and beyond
    the shapes it is as good as the formulas: measure the corners, the longest item among them.

    Args:
        measured: bytes by pairs of items and length, five shapes or more.
        margin: added as a part of what lies above the base.

    Raises:
        UsageError: there are too few shapes, or one is no size.
    """
    number_argument("margin", margin, least=0.0, most=10.0)
    if len(measured) < 5:
        raise UsageError(
            f"{len(measured)} measured shapes are too few for a bound",
            "Measure five or more: one item and several, short and long",
        )
    if any(not isinstance(shape, tuple) or len(shape) != 2 for shape in measured):
        raise UsageError("measured shapes are no pairs", "Give bytes by (items, length)")
    if any(items < 1 or length < 1 or not 0 < peak < math.inf for (items, length), peak in measured.items()):
        raise UsageError("a measured shape or its bytes are no size", "Give items, length and bytes above 0")
    shapes = np.array(list(measured), dtype=float)
    peaks = np.array(list(measured.values()), dtype=float)
    formulas = [
        _tightest(shapes, peaks, peaks * np.abs(np.log2(shapes[:, 1] / length) * _FOCUS).clip(1) ** -2)
        for length in sorted(set(shapes[:, 1]))
    ]

    def bound(items: int, length: int) -> float:
        return min(one(items, length) + margin * (one(items, length) - one.base) for one in formulas)

    return PeakBound(bound)


def _tightest(shapes: _Floats, peaks: _Floats, weights: _Floats) -> PeakFormula:
    """The formula above all peaks with the least weighted sum of what it lies above, as parts of the peaks.

    Raises:
        UsageError: the linear program has no solution.
    """
    items, lengths = shapes[:, 0], shapes[:, 1]
    terms = np.stack([np.ones_like(items), items, items * lengths, items * lengths**2, lengths**2], axis=1)
    shares = terms / peaks[:, None]
    scale = shares.max(axis=0)  # terms of very different sizes become 1: the solver's tolerances are absolute
    scaled = shares / scale
    cost = (scaled * (weights / weights.max())[:, None]).sum(axis=0)
    solved = linprog(cost, A_ub=-scaled, b_ub=-np.ones(len(peaks)), bounds=(0, None))
    if not solved.success:
        raise UsageError(f"no bound goes through the measured shapes: {solved.message}", "Measure others")
    # What the solver's tolerance leaves below is added.
    least = max(1.0, float((1 / (scaled @ solved.x)).max()))
    return PeakFormula(*(float(value) for value in solved.x / scale * least))
