"""Where tiles lie: exact grids of cores with halos, and blended grids of tiles that overlap."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vramfit.errors import UsageError
from vramfit.inference.tile_settings import TileSettings, per_axis, shares_per_axis

_OVERLAP = 0.25
"""Of a blended grid where none is given, as MONAI's sliding windows have it."""


@dataclass(frozen=True, slots=True)
class AxisTile:
    """A tile along one axis, in steps of the input.

    Attributes:
        start, stop: what the model is given; of a picture that is padded, with the padding.
        keep_start, keep_stop: whose results are kept. In an exact grid the kept parts of all tiles are the whole axis,
            once each.
    """

    start: int
    stop: int
    keep_start: int
    keep_stop: int

    @property
    def size(self) -> int:
        """Steps that the model is given."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Tile:
    """One tile.

    Attributes:
        index: its number, in the order in which tiles are computed: item by item, the last axis fastest.
        item: the example of the batch that it belongs to.
        place: its number along each axis.
        axes: where it lies along each axis.
    """

    index: int
    item: int
    place: tuple[int, ...]
    axes: tuple[AxisTile, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """What the model is given, along each axis."""
        return tuple(axis.size for axis in self.axes)


@dataclass(frozen=True, kw_only=True)
class TileLayout:
    """All tiles of one input.

    Attributes:
        items: examples; an input without a batch axis has one.
        channels: of the input, 0 where it has no axis for them.
        spatial: the input's length along each spatial axis.
        tile: the tile's, halo included.
        halo: what is cut off on each inner side; zeros in a blended grid.
        stride: tiles begin at its multiples; ones in a blended grid.
        blended: whether tiles overlap.
        padding: what is put before and after the picture along each axis, where it is smaller than a blended tile.
        axes: the tiles along each axis.
        tile_batch: tiles that the model is given at once.
    """

    items: int
    channels: int
    spatial: tuple[int, ...]
    tile: tuple[int, ...]
    halo: tuple[int, ...]
    stride: tuple[int, ...]
    blended: bool
    padding: tuple[tuple[int, int], ...]
    axes: tuple[tuple[AxisTile, ...], ...]
    tile_batch: int

    @property
    def counts(self) -> tuple[int, ...]:
        """Tiles along each axis."""
        return tuple(len(axis) for axis in self.axes)

    @property
    def per_item(self) -> int:
        """Tiles of one example."""
        return math.prod(self.counts)

    @property
    def total(self) -> int:
        """Tiles of all examples."""
        return self.items * self.per_item

    @property
    def batches(self) -> int:
        """How often the model is called for the whole input."""
        return sum(1 for _ in self.batched())

    @cached_property
    def work(self) -> float:
        """Steps of the input that the model is given in all, over those that the input has."""
        given = math.prod(sum(one.size for one in axis) for axis in self.axes)
        return given / math.prod(self.spatial)

    def tile_at(self, index: int) -> Tile:
        """The tile of a number."""
        item, rest = divmod(index, self.per_item)
        place = []
        for count in reversed(self.counts):
            rest, at = divmod(rest, count)
            place.append(at)
        place.reverse()
        axes = tuple(axis[at] for axis, at in zip(self.axes, place, strict=True))
        return Tile(index=index, item=item, place=tuple(place), axes=axes)

    def tiles(self) -> Iterator[Tile]:
        """All tiles in the order in which they are computed."""
        index = 0
        places = [range(count) for count in self.counts]
        for item in range(self.items):
            for place in itertools.product(*places):
                axes = tuple(axis[at] for axis, at in zip(self.axes, place, strict=True))
                yield Tile(index=index, item=item, place=place, axes=axes)
                index += 1

    def batched(self, tiles: Iterator[Tile] | None = None) -> Iterator[list[Tile]]:
        """Tiles in the batches that the model is given: neighbours of the same size."""
        batch: list[Tile] = []
        for tile in self.tiles() if tiles is None else tiles:
            if batch and (len(batch) == self.tile_batch or batch[0].sizes != tile.sizes):
                yield batch
                batch = []
            batch.append(tile)
        if batch:
            yield batch


def make_layout(shape: Sequence[int], axes: int, batched: bool, settings: TileSettings) -> TileLayout:
    """Cut an input into tiles.

    Args:
        shape: of the input: ``[B, C, *spatial]``, or ``[C, *spatial]`` without a batch axis.
        axes: spatial axes, 1 to 3.
        batched: whether the first axis is the batch.
        settings: with a tile, and a halo unless the grid is blended.

    Raises:
        UsageError: the settings do not fit the input.
    """
    settings.check()
    spatial = tuple(int(size) for size in shape[len(shape) - axes :])
    if min(spatial) < 1 or math.prod(shape) == 0:
        raise UsageError(f"the input of shape {tuple(shape)} is empty", "Give one with values")
    common: dict[str, Any] = {
        "items": int(shape[0]) if batched else 1,
        "channels": int(shape[len(shape) - axes - 1]),
        "spatial": spatial,
        "tile_batch": settings.tile_batch,
        "blended": settings.blended,
    }
    tile = _tile_of(settings, spatial)
    if settings.blended:
        overlap = _OVERLAP if settings.overlap is None else settings.overlap
        shares = shares_per_axis("overlap", overlap, axes, most=1)
        padding = tuple(
            ((size - length) // 2, size - length - (size - length) // 2) if size > length else (0, 0)
            for size, length in zip(tile, spatial, strict=True)
        )
        return TileLayout(
            **common,
            tile=tile,
            halo=(0,) * axes,
            stride=(1,) * axes,
            padding=padding,
            axes=tuple(map(blended_axis, spatial, tile, shares)),
        )
    halo = per_axis("halo", 0 if settings.halo is None else settings.halo, axes, least=0)
    stride = per_axis("stride", 1 if settings.stride is None else settings.stride, axes, least=1)
    halo = tuple(-(-size // step) * step for size, step in zip(halo, stride, strict=True))
    tile = tuple(
        length if size >= length else size // step * step
        for size, length, step in zip(tile, spatial, stride, strict=True)
    )
    return TileLayout(
        **common,
        tile=tile,
        halo=halo,
        stride=stride,
        padding=((0, 0),) * axes,
        axes=tuple(map(exact_axis, spatial, tile, halo, stride)),
    )


def _tile_of(settings: TileSettings, spatial: tuple[int, ...]) -> tuple[int, ...]:
    given = settings.tile
    values = tuple(given) if isinstance(given, tuple | list) else (given,) * len(spatial)
    filled = tuple(
        length if value is None else value for value, length in itertools.zip_longest(values, spatial)
    )
    if len(values) != len(spatial):
        raise UsageError(
            f"tile={given!r} has {len(values)} numbers for {len(spatial)} spatial axes",
            "Give one an axis, or a single one",
        )
    return per_axis("tile", filled, len(spatial), least=1)


def blended_axis(length: int, tile: int, overlap: float) -> tuple[AxisTile, ...]:
    """Tiles along an axis, each `overlap` of a tile into the one before, the last one moved to end with the axis.

    Places are those of MONAI's ``sliding_window_inference``: steps of ``int(tile * (1 - overlap))``, at least one.
    """
    if tile >= length:
        return (AxisTile(0, tile, 0, tile),)
    step = max(int(tile * (1 - overlap)), 1)
    starts = [min(start, length - tile) for start in range(0, length - tile + step, step)]
    return tuple(AxisTile(start, start + tile, start, start + tile) for start in starts)


def exact_axis(length: int, tile: int, halo: int, stride: int) -> tuple[AxisTile, ...]:
    """Tiles along an axis whose kept parts are the whole axis, once each.

    Every tile begins at a multiple of the stride and is `tile` long, but the last, which is shorter by less than a
    stride where the axis is no multiple of it. At the ends of the axis a tile has no halo: the model pads there as it
    does in the whole run.

    Raises:
        UsageError: the halo leaves nothing of a tile.
    """
    if tile >= length:
        return (AxisTile(0, length, 0, length),)
    if tile - 2 * halo < stride:
        least = 2 * halo + stride
        raise UsageError(
            f"a halo of {halo} on both sides leaves nothing of a tile of {tile}",
            f"Pass a tile of {least} or more, or overlap in place of a halo"
            if least < length
            else f"A value depends on so much that no tile shorter than the input's {length} will do: pass overlap in "
            "place of a halo, which is another result, or run the model layer by layer",
        )
    tiles = []
    start = kept = 0
    last = -(-(length - tile) // stride) * stride
    while start < last:
        keep_stop = start + tile - halo
        tiles.append(AxisTile(start, start + tile, kept, keep_stop))
        kept, start = keep_stop, min(keep_stop - halo, last)
    tiles.append(AxisTile(start, length, kept, length))
    return tuple(tiles)
