"""Which tile is the quickest within a budget: few of them are run, the others are told from those.

NOTE [Tiles worth a look]: along a dimension of n elements that is cut into k parts, only the smallest tile that covers
it in k parts is of interest: a larger one computes more and saves nothing. So a choice is a number of parts for each
dimension, and a number of tiles that are run together. Tiles are kept about as long in one direction as in the others,
where the image allows it: of two tiles with the same volume, the one that is nearer to a cube repeats less of its
neighbours.

NOTE [What is run]: seconds of a call and its memory grow with the elements of the tiles in it, seldom evenly: a card
that has too little to do takes its least time, and kernels change with the size. What was run is therefore
interpolated between its neighbours by elements, and what is told to be the best is run, until it has been.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from vramfit.inference.tile_grid import blended_axis, exact_axis
from vramfit.searching.orders import go_by
from vramfit.searching.tries import Tries

Progress = Callable[[str], None]

_LONGEST = 2.0
"""How much longer a side of a tile may be than another that the image leaves free."""

_BATCHES = (1, 2, 4, 8, 16, 32)
"""Numbers of tiles that are run together."""

_PARTS_UP_TO = {1: 32, 2: 16}
"""Numbers of parts that are all looked at, by dimensions; of more, each is about a quarter more than the one before."""

_MOST_RUNS = 24
"""Tiles that are run in a search."""

_NEAR = 0.1
"""Part of the best seconds within which another tile is run too: what is told of it may be off by that."""

_MOST_TILES = 10_000
"""Tiles of an image above which smaller ones are left out, as long as there are others: each costs a call."""

_SLACK = 0.05
"""Part of the limit by which what is told of a tile's memory may be too high."""

_PATIENCE = 8
"""Runs in a row that may be no better than the best before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TileOption:
    """A tile, and how many are run together.

    Attributes:
        tile: elements along each dimension, with the halo.
        batch: tiles in one call.
        count: tiles that cover the image.
    """

    tile: tuple[int, ...]
    batch: int
    count: int

    @property
    def calls(self) -> int:
        """Calls of the model for the whole image."""
        return -(-self.count // self.batch)

    @property
    def words(self) -> str:
        """The tile, for people."""
        together = f", {self.batch} together" if self.batch > 1 else ""
        return f"tiles of {' x '.join(map(str, self.tile))}{together}"

    @property
    def elements(self) -> int:
        """Elements of one channel in one call."""
        return math.prod(self.tile) * self.batch


@dataclass(frozen=True, kw_only=True, slots=True)
class TileCost:
    """What a tile costs.

    Attributes:
        fits: whether it runs within the budget.
        total_bytes: all that the device has to have; on one without a limit, where it does not fit.
        seconds: for the whole image.
    """

    fits: bool
    total_bytes: int
    seconds: float


def tile_options(
    shape: Sequence[int],
    *,
    halo: Sequence[int],
    stride: Sequence[int],
    overlap: Sequence[float] | None = None,
    batches: Sequence[int] = _BATCHES,
) -> list[TileOption]:
    """The tiles that are worth a look, the whole image first.

    Args:
        shape: elements of the image along each dimension.
        halo: elements that a tile needs on either side beyond those that it answers for.
        stride: what the length of a tile, and where it begins, has to be a multiple of.
        overlap: part of a tile's length that the next one shares, for tiles that are blended; None for exact ones.
        batches: numbers of tiles that may be run together; more than there are tiles are left out.
    """
    found = []
    shares = (None,) * len(shape) if overlap is None else overlap
    all_up_to = _PARTS_UP_TO.get(len(shape), 8)
    sides = [
        list(
            _sides(Side(size, -(-edge // step) * step, step, share), all_up_to)
        )  # as make_layout takes the halo
        for size, edge, step, share in zip(shape, halo, stride, shares, strict=True)
    ]
    for chosen in product(*sides):
        tile = tuple(length for length, _ in chosen)
        if not _about_even(tile, shape):
            continue
        count = math.prod(parts for _, parts in chosen)
        found += [
            TileOption(tile=tile, batch=batch, count=count)
            for batch in batches
            if batch == 1 or batch <= count
        ]
    few = [option for option in found if option.count <= _MOST_TILES]
    return sorted(few or found, key=lambda option: (option.count, -math.prod(option.tile), option.batch))


@dataclass(frozen=True, slots=True)
class Side:
    """A dimension of an image, and what tiles have to keep along it; see `tile_options`."""

    size: int
    halo: int
    stride: int
    overlap: float | None

    def shortest(self, parts: int) -> int:
        """The shortest tile that covers it in so many parts."""
        if self.overlap is not None:
            length = math.ceil(self.size / (1 + (parts - 1) * (1 - self.overlap)))
        else:
            length = math.ceil((self.size + 2 * self.halo * (parts - 1)) / parts)
        return min(-(-length // self.stride) * self.stride, self.size)

    def count(self, length: int) -> int:
        """How many tiles of a length there are."""
        if self.overlap is not None:
            return len(blended_axis(self.size, length, self.overlap))
        return len(exact_axis(self.size, length, self.halo, self.stride))

    @property
    def least(self) -> int:
        """The shortest tile of which the halo leaves something."""
        return 2 * self.halo + self.stride


def _sides(side: Side, all_up_to: int) -> Iterator[tuple[int, int]]:
    """Lengths of a tile along one dimension, each the smallest with its number of parts, and that number."""
    seen = set()
    for parts in _part_numbers(side.size, all_up_to):
        length = side.shortest(parts)
        if length < side.size and length < side.least:
            return
        if length not in seen:
            seen.add(length)
            yield length, side.count(length)


def _part_numbers(size: int, all_up_to: int) -> Iterator[int]:
    parts = 1
    while parts <= size:
        yield parts
        parts = parts + 1 if parts < all_up_to else parts * 5 // 4


def _about_even(tile: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether no side is much longer than another that could be as long."""
    longest = max(tile)
    return all(side * _LONGEST >= min(longest, size) for side, size in zip(tile, shape, strict=True))


class TileSearch:
    """The quickest of some tiles: which one is to be run next.

    Args:
        options: to choose from.
        cost: runs one.
        limit: bytes that the device may take.
    """

    def __init__(
        self,
        options: Sequence[TileOption],
        cost: Callable[[TileOption], TileCost],
        limit: int,
        progress: Progress = lambda _text: None,
    ) -> None:
        self._options, self._limit = options, limit
        self._tries = Tries(cost, progress=lambda option: progress(option.words))

    @property
    def seen(self) -> Mapping[TileOption, TileCost]:
        """What was run, in order."""
        return self._tries.answers

    def best(self) -> tuple[TileOption, TileCost] | None:
        """The quickest tile that was run and fits; None where none does."""
        for option in self._first():
            self._tries(option)
        go_by(
            self._tries,
            lambda: self._promising(self._limit) or self._promising(self._limit * (1 + _SLACK)),
            _seconds,
            most=_MOST_RUNS,
            patience=_PATIENCE,
        )
        fitting = [(option, cost) for option, cost in self.seen.items() if cost.fits]
        return min(fitting, key=lambda found: (found[1].seconds, found[1].total_bytes), default=None)

    @property
    def smallest(self) -> tuple[TileOption, TileCost]:
        """What was run with the least memory."""
        return min(self.seen.items(), key=lambda found: found[1].total_bytes)

    def _first(self) -> list[TileOption]:
        """The smallest, to know whether anything fits, and one that is somewhat larger, to tell how it goes on."""
        ordered = sorted(self._options, key=lambda option: option.elements)
        more = [option for option in ordered if option.elements >= 4 * ordered[0].elements]
        return list(dict.fromkeys((ordered[0], more[0] if more else ordered[-1])))

    def _promising(self, limit: float) -> TileOption | None:
        """What is told to stay within a limit and to be quicker than all that was run, or nearly; None without any."""
        enough = min(map(_seconds, self.seen.values()), default=math.inf) * (1 + _NEAR)
        points = sorted(
            (known.elements, float(cost.total_bytes), cost.seconds / known.calls)
            for known, cost in self.seen.items()
        )
        sizes = {elements: size for elements, size, _ in points}  # of several the largest
        calls = {elements: seconds for elements, _, seconds in points}
        best: tuple[TileOption | None, float] = (None, math.inf)
        for option in self._options:
            if option in self.seen or _between(sizes, option.elements) > limit:
                continue
            seconds = _between(calls, option.elements) * option.calls
            if seconds < min(best[1], enough):
                best = option, seconds
        return best[0]


def _seconds(cost: TileCost) -> float:
    return cost.seconds if cost.fits else math.inf


def _between(curve: Mapping[int, float], at: float) -> float:
    """A value between the points of a curve, which rise; beyond them along its first or last piece."""
    places = list(curve)
    if len(places) == 1:
        return curve[places[0]] * max(1.0, at / places[0])
    index = min(max(bisect_left(places, at), 1), len(places) - 1)
    low, high = places[index - 1], places[index]
    value = curve[low] + (curve[high] - curve[low]) / (high - low) * (at - low)
    return max(value, curve[high]) if at > high else max(value, 0.0)
