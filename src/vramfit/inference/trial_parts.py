"""Which parts of an input the check of tiles runs whole: sizes, and the tiles in corners, at borders and in the middle.

NOTE [Parts that stand for the whole]: the whole input itself where time allows. Else slabs: as long as the input along
one axis and thin along the others, or shorter, but of the same remainder by the stride and by 2, with a tile that has
the same halo, its core as small as the stride allows, and steps beyond it on both sides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vramfit.inference.tile_grid import AxisTile, TileLayout, exact_axis

_CORE = 4
"""Steps of a shortened tile whose results are kept, at least."""

_BEYOND = 8
"""Steps beyond a shortened tile on each side, at least."""

_THIN = (8, 16, 32, 64, 128, 256)
"""Lengths of a slab along the axes that are not cut, of which the first that the model takes is used."""


@dataclass(frozen=True, kw_only=True)
class TrialPart:
    """A part of the input, run whole and in tiles.

    Attributes:
        sizes: its spatial lengths.
        tiles: those that are tried, each along every axis.
    """

    sizes: tuple[int, ...]
    tiles: tuple[tuple[AxisTile, ...], ...]

    @property
    def steps(self) -> int:
        """Steps of the input that a round over its tiles gives the model: for each tile the whole and the tile."""
        tiles = sum(math.prod(axis.size for axis in tile) for tile in self.tiles)
        return len(self.tiles) * math.prod(self.sizes) + tiles

    @property
    def calls(self) -> int:
        """Calls of the model in a round."""
        return 2 * len(self.tiles)


def cut_axes(layout: TileLayout) -> list[int]:
    """The axes along which there is more than one tile."""
    return [axis for axis, tiles in enumerate(layout.axes) if len(tiles) > 1]


def whole_part(layout: TileLayout) -> TrialPart:
    """All of the input, with the tiles of the run."""
    return TrialPart(sizes=layout.spatial, tiles=_positions([_picked(tiles) for tiles in layout.axes]))


def corner_part(layout: TileLayout) -> TrialPart:
    """A part that is shortened along every axis that is cut."""
    axes = [
        _shortened(layout, axis) if len(tiles) > 1 else (layout.spatial[axis], tiles)
        for axis, tiles in enumerate(layout.axes)
    ]
    return TrialPart(
        sizes=tuple(size for size, _ in axes), tiles=_positions([_picked(tiles) for _, tiles in axes])
    )


def slab_part(layout: TileLayout, axis: int, thin: int, *, long: bool) -> TrialPart:
    """A slab along one axis.

    Args:
        thin: about its length along the other axes.
        long: whether it is as long as the input, with the run's tiles.
    """
    size, tiles = (layout.spatial[axis], layout.axes[axis]) if long else _shortened(layout, axis)
    sizes, picks = [], []
    for other in range(len(layout.spatial)):
        if other == axis:
            sizes.append(size)
            picks.append(_picked(tiles))
        else:
            width = _like(layout.spatial[other], thin, layout.stride[other])
            sizes.append(width)
            picks.append([AxisTile(0, width, 0, width)])
    return TrialPart(sizes=tuple(sizes), tiles=_positions(picks))


def thin_lengths(layout: TileLayout) -> Iterator[int]:
    """Lengths to try for slabs, from short ones on, up to the input's own."""
    most = max(layout.spatial)
    yield from (length for length in _THIN if length < most)
    yield most


def longer_sizes(layout: TileLayout, sizes: Sequence[int]) -> tuple[int, ...]:
    """Some sixteen times as many steps, within the input."""
    times = {1: 16, 2: 4, 3: 3}[len(sizes)]
    return tuple(
        _like(length, min(times * size, length), stride)
        for length, size, stride in zip(layout.spatial, sizes, layout.stride, strict=True)
    )


def _shortened(layout: TileLayout, axis: int) -> tuple[int, tuple[AxisTile, ...]]:
    """A shorter length of the same remainder, and its tiles; the input's own where it would not be shorter."""
    length, halo, stride = layout.spatial[axis], layout.halo[axis], layout.stride[axis]
    tile = 2 * halo + -(-_CORE // stride) * stride
    beyond = -(-_BEYOND // stride) * stride
    short = _like(length, tile + 2 * beyond + stride, stride)
    if short >= length or tile >= layout.tile[axis]:
        return length, layout.axes[axis]
    return short, exact_axis(short, tile, halo, stride)


def _like(length: int, least: int, stride: int) -> int:
    """The shortest length from `least` on with the remainder of `length` by the stride and by 2, or `length`."""
    period = math.lcm(stride, 2)
    return min(length, least + (length - least) % period)


def _picked(tiles: Sequence[AxisTile]) -> list[AxisTile]:
    """The first, a middle and the last tile along an axis."""
    return list(dict.fromkeys((tiles[0], tiles[len(tiles) // 2], tiles[-1])))


def _positions(picks: Sequence[list[AxisTile]]) -> tuple[tuple[AxisTile, ...], ...]:
    """Corners, middle and borders: for one axis all tiles, else a selection of the products."""
    if math.prod(map(len, picks)) <= 3:
        return tuple(itertools.product(*picks))
    first, last = [one[0] for one in picks], [one[-1] for one in picks]
    middle = [one[len(one) // 2] for one in picks]
    chosen = [first, middle, last, [(first, last)[axis % 2][axis] for axis in range(len(picks))]]
    chosen.append([(last, first)[axis % 2][axis] for axis in range(len(picks))])
    chosen.extend(
        [*middle[:axis], side[axis], *middle[axis + 1 :]]
        for axis in range(len(picks))
        for side in (first, last)
    )
    return tuple(dict.fromkeys(map(tuple, chosen)))
