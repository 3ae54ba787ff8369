"""An upper bound on what a step takes, learnt while steps run: least squares, with a quantile of its own errors on top.

NOTE [The bound]: memory is linear in what a batch has: items, tokens, and tokens times length where attention is not
fused. Recursive least squares with forgetting follow it (Haykin, Adaptive Filter Theory, chapter 10), on relative
errors, since what an allocator adds is a part of the whole. Errors of predictions *before* they are learnt from are
kept; the bound is the prediction and the largest of the last ones, with half as much again, as in split conformal
prediction (Vovk et al. 2005) at the level that a window allows. It is wider where a batch is unlike those seen (its
leverage). A step that ran out widens it at once and many good steps narrow it again, as in adaptive conformal inference
(Gibbs and Candès 2021, arXiv:2106.00170): where running out comes of the bound, its rate settles at the wanted one,
however errors are distributed.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

_FEATURES = 4

_FEW = 20
"""Errors of which the largest says little."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantileSettings:
    """How a bound is learnt.

    Attributes:
        forgetting: of earlier steps, each step.
        window: errors that are kept.
        wanted: part of the steps that may run out.
        widening: of the bound after one that did, as a part of the prediction.
        least: that is always added, as a part.
        inflation: of the largest error: the next 1,000 steps hold larger ones than the last 400.
        unknown: added while there are too few errors to go by, as a part.
    """

    forgetting: float = 0.999
    window: int = 400
    wanted: float = 0.0005
    widening: float = 0.02
    least: float = 0.025
    inflation: float = 1.5
    unknown: float = 0.1


class PeakQuantile:
    """What steps take, as a bound that few exceed. See NOTE [The bound].

    Attributes:
        count: steps that it has learnt from.
        most_tokens: of them.
    """

    def __init__(self, settings: QuantileSettings = QuantileSettings()) -> None:  # it is frozen
        self._settings = settings
        self._weights = np.zeros(_FEATURES)
        self._spread = np.eye(_FEATURES) * 1e6
        self._errors: deque[float] = deque(maxlen=settings.window)
        self._widened = 0.0
        self._unit = (1.0, 1.0)  # bytes and length by which features are scaled, those of the first step
        self.count, self.most_tokens = 0, 0

    def learn(self, items: int, length: int, taken_bytes: int) -> None:
        """Learn from a step that ended.

        Args:
            taken_bytes: at its highest, beside what was there before it.
        """
        taken = float(max(taken_bytes, 1))
        if not self.count:
            self._unit = (taken, float(length))
        row = self._features(items, length) / (taken / self._unit[0])
        if self.count > _FEATURES:
            predicted = self.predicted(items, length)
            # An error counts as what it would have been near: a batch unlike those seen may err by more.
            self._errors.append((taken / predicted - 1) / (1 + self._leverage(items, length)))
        gain = self._spread @ row / (self._settings.forgetting + row @ self._spread @ row)
        self._weights = self._weights + gain * (1.0 - row @ self._weights)
        self._spread = (self._spread - np.outer(gain, row @ self._spread)) / self._settings.forgetting
        self._spread = np.clip((self._spread + self._spread.T) / 2, -1e6, 1e6)
        self.count += 1
        self.most_tokens = max(self.most_tokens, items * length)
        settings = self._settings
        self._widened = max(0.0, self._widened - settings.widening * settings.wanted / (1 - settings.wanted))

    def ran_out(self) -> None:
        """Widen the bound, after a step within it that ran out."""
        self._widened += self._settings.widening

    def predicted(self, items: int, length: int) -> float:
        """Bytes that a step takes, most likely."""
        return max(1.0, float(self._features(items, length) @ self._weights) * self._unit[0])

    def bound(self, items: int, length: int) -> float:
        """Bytes that few steps exceed."""
        settings = self._settings
        margin = max(settings.least, settings.inflation * max(self._errors, default=0.0))
        if settings.window and len(self._errors) < _FEW:
            margin = max(margin, settings.unknown)
        return self.predicted(items, length) * (
            1 + margin * (1 + self._leverage(items, length)) + self._widened
        )

    def _leverage(self, items: int, length: int) -> float:
        """How unlike those seen a batch is: 0 for the mean of many, 1 and more for another kind."""
        row = self._features(items, length)
        scale = max(abs(float(row @ self._weights)), 1e-9)
        return min(4.0, math.sqrt(max(0.0, float(row @ self._spread @ row))) / scale)

    def _features(self, items: int, length: int) -> np.ndarray:
        tokens, ratio = float(items * length), length / self._unit[1]
        return np.array(
            [1.0, items / 64, tokens / (64 * self._unit[1]), tokens * ratio / (64 * self._unit[1])]
        )
