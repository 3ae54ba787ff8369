"""How others choose batches of texts: a regression on the peak, and a budget of tokens.

The regression is crossfit's (github.com/rapidsai/crossfit, version 0.0.9 on PyPI, Apache 2.0), written anew after what
``backend/torch/hf/memory_curve_utils.py`` and ``backend/torch/loader.py`` do, since the package itself runs on cudf
and a card alone. It regresses the allocated peak on the number of items, the length and its square, without their
products; calls ``max_mem`` divided by 2.5 its limit; sorts items longest first; and starts each batch with 512 items or
more. A batch that runs out of memory is halved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

GIB = 1 << 30
Estimate = Callable[[int, int], float]

CROSSFIT_BATCH = 512
CROSSFIT_GRID = {"items": (1, 2048, 256), "lengths": (1, 64)}
"""First, last and step of the items that it measures, first and step of the lengths."""


@dataclass(frozen=True, slots=True)
class PeerBatch:
    """Some items, in the order of their lengths, padded to the longest."""

    numbers: list[int]
    length: int

    def halves(self, lengths: Sequence[int]) -> list[PeerBatch]:
        """What becomes of it when memory runs out."""
        middle = (len(self.numbers) + 1) // 2
        parts = (self.numbers[:middle], self.numbers[middle:])
        return [PeerBatch(part, lengths[part[0]]) for part in parts if part]


def crossfit_shapes(longest: int) -> list[tuple[int, int]]:
    """The shapes that it measures; a number of items is given up at the first length that does not fit."""
    first, last, step = CROSSFIT_GRID["items"]
    begin, by = CROSSFIT_GRID["lengths"]
    return [
        (items, length) for items in range(first, last + 1, step) for length in range(begin, longest + 1, by)
    ]


def crossfit_estimate(peaks: dict[tuple[int, int], int]) -> Estimate:
    """GiB by least squares on (1, items, length, length squared)."""
    rows = np.array([[1.0, items, length, length**2] for items, length in peaks])
    found = np.linalg.lstsq(rows, np.array([peak / GIB for peak in peaks.values()]), rcond=None)[0]
    return lambda items, length: float(found @ np.array([1.0, items, length, length**2]))


def crossfit_batches(lengths: Sequence[int], estimate: Estimate, limit_gib: float) -> list[PeerBatch]:
    """The batches that its loader makes of items."""
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    longest = lengths[order[0]]
    doublings, step = 8, CROSSFIT_BATCH
    found: list[PeerBatch] = []
    begin = 0
    while begin < len(order):
        end = begin + CROSSFIT_BATCH
        for attempt in range(doublings):
            tried = min(begin + 2 * end, len(order))
            if estimate(tried - begin, lengths[order[tried - 1]]) > limit_gib:
                doublings = attempt  # fewer attempts for all batches that follow
                break
            end = tried
        for _ in range(8):
            tried = min(end + step, len(order))
            shortest = lengths[order[tried - 1]]
            penalty = 1 + 5.0 * (shortest / longest) ** 2
            if estimate(tried - begin, shortest) * penalty <= limit_gib:
                end = tried
                break
            step //= 2  # for all batches that follow, too
        numbers = order[begin : min(end, len(order))]
        found.append(PeerBatch(numbers, lengths[numbers[0]]))
        begin = end
    return found


def budget_batches(lengths: Sequence[int], tokens: int, multiple: int = 8) -> list[PeerBatch]:
    """Items sorted by length, as many as stay within so many tokens, padding included; one at least.

    Lengths are rounded up to a multiple, as tokenizers' ``pad_to_multiple_of`` does.
    """
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    found: list[PeerBatch] = []
    begin = 0
    while begin < len(order):
        longest = -(-lengths[order[begin]] // multiple) * multiple
        end = begin + max(1, tokens // longest)
        found.append(PeerBatch(order[begin:end], longest))
        begin = end
    return found
