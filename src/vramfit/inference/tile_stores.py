"""Where complete blocks of a result are kept: in an array as they come, or shard by shard.

Blocks are numbered, so that a journal can say which are stored. An array that is written as blocks come has a number
for each tile (an exact grid) or for each row of tiles (a blended one, whose rows leave the window together); an array
of shards has one for each shard.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from vramfit.inference.arrays import Region, WritableArray, host_zeros, last_axes, write_block
from vramfit.inference.stitching import Geometry, Released
from vramfit.inference.tile_grid import Tile


@dataclass(frozen=True, kw_only=True, slots=True)
class ResultShape:
    """What a result looks like.

    Attributes:
        items: examples; None where the input has no batch axis, and so the result has none.
        lead: lengths before the spatial axes.
        spatial: the spatial axes.
        dtype: of its values.
    """

    items: int | None
    lead: tuple[int, ...]
    spatial: tuple[int, ...]
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """All its lengths."""
        return (*(() if self.items is None else (self.items,)), *self.lead, *self.spatial)

    def key(self, item: int, region: Region) -> tuple[Any, ...]:
        """The slices of a block."""
        return (*(() if self.items is None else (item,)), *(slice(None) for _ in self.lead), *region)


class TileStore(ABC):
    """Takes the complete blocks of one output.

    Args:
        array: what they are written to.
        result: what the result looks like.
        geometry: where results of tiles belong.
        stored: numbers of blocks that are stored already.

    Attributes:
        waiting_bytes: written since the last `flush`.
    """

    def __init__(
        self, array: WritableArray, result: ResultShape, geometry: Geometry, stored: Iterable[int] = ()
    ) -> None:
        self.array, self.result, self.geometry = array, result, geometry
        self.stored = set(stored)
        self.waiting_bytes = 0
        self._fresh: set[int] = set()

    @abstractmethod
    def units_of(self, tile: Tile) -> Iterable[int]:
        """Numbers of the blocks that a tile has a part in."""

    @abstractmethod
    def put(self, released: Released, *, hollow: bool = False) -> None:
        """Take a block; `hollow` says that it holds no values to write."""

    @property
    def held_bytes(self) -> int:
        """Bytes of blocks that wait here until they can be written."""
        return 0

    def lies_on(self, device: torch.device) -> bool:
        """Whether its array is a tensor of that card."""
        return device.type != "cpu" and isinstance(self.array, torch.Tensor) and self.array.device == device

    def wants(self, tile: Tile) -> bool:
        """Whether something that a tile has a part in is not stored yet."""
        return any(unit not in self.stored for unit in self.units_of(tile))

    def flush(self) -> set[int]:
        """Bring what was written to the disk; gives the numbers of the blocks."""
        flush = getattr(self.array, "flush", None)
        if callable(flush) and self._fresh:
            flush()
        found, self._fresh = self._fresh, set()
        self.stored |= found
        self.waiting_bytes = 0
        return found

    def _part(self, tile: Tile) -> Region:
        """The part of the result that a tile has a part in."""
        geometry = self.geometry
        if not geometry.layout.blended:
            return geometry.kept(tile)
        return tuple(
            slice(max(one.start, crop.start) - crop.start, min(one.stop, crop.stop) - crop.start)
            for one, crop in zip(geometry.given(tile), geometry.crop, strict=True)
        )

    def _write(self, item: int, region: Region, block: torch.Tensor) -> None:
        write_block(self.array, self.result.key(item, region), block)
        self.waiting_bytes += block.nbytes


class PlainStore(TileStore):
    """Writes blocks as they come."""

    def units_of(self, tile: Tile) -> Iterable[int]:
        """See `TileStore`."""
        layout = self.geometry.layout
        if not layout.blended:
            return (tile.index,)
        reach = tile.axes[0].stop
        first = tile.item * layout.counts[0]
        return (
            first + place
            for place in range(tile.place[0], layout.counts[0])
            if layout.axes[0][place].start < reach
        )

    def put(self, released: Released, *, hollow: bool = False) -> None:
        """See `TileStore`."""
        if released.unit in self.stored:
            return
        if not hollow:
            self._write(released.item, released.region, released.block)
        if released.last:
            self._fresh.add(released.unit)


class ShardStore(TileStore):
    """Collects blocks until a shard is full, and writes each shard once.

    A shard is what an array writes as one file: to write half of it means to read, join and write it again, and two
    writers of one shard lose each other's halves.

    Args:
        shard: lengths of a shard along all axes of the array.
    """

    def __init__(
        self,
        array: WritableArray,
        result: ResultShape,
        geometry: Geometry,
        stored: Iterable[int] = (),
        *,
        shard: tuple[int, ...],
    ) -> None:
        super().__init__(array, result, geometry, stored)
        axes = len(result.spatial)
        self._items = 1 if result.items is None else shard[0]
        self._shard = shard[len(shard) - axes :]
        self._grid = tuple(-(-size // step) for size, step in zip(result.spatial, self._shard, strict=True))
        self._open: dict[int, tuple[torch.Tensor, int]] = {}

    @property
    def held_bytes(self) -> int:
        """See `TileStore`."""
        return sum(buffer.nbytes for buffer, _ in self._open.values())

    def units_of(self, tile: Tile) -> Iterable[int]:
        """See `TileStore`."""
        return (unit for unit, _ in self._shards(tile.item, self._part(tile)))

    def _shards(self, item: int, region: Region) -> Iterable[tuple[int, Region]]:
        """The shards that a region lies in, with the place of each in the result."""
        ranges = [
            range(part.start // step, -(-part.stop // step))
            for part, step in zip(region, self._shard, strict=True)
        ]
        sizes = self.result.spatial
        for place in itertools.product(*ranges):
            unit = item // self._items
            for at, count in zip(place, self._grid, strict=True):
                unit = unit * count + at
            yield (
                unit,
                tuple(
                    slice(at * step, min((at + 1) * step, size))
                    for at, step, size in zip(place, self._shard, sizes, strict=True)
                ),
            )

    def put(self, released: Released, *, hollow: bool = False) -> None:
        """See `TileStore`."""
        for unit, place in self._shards(released.item, released.region):
            if unit in self.stored or unit in self._fresh:
                continue
            first = released.item // self._items * self._items
            items = min(self._items, (self.result.items or 1) - first)
            extent = tuple(part.stop - part.start for part in place)
            if unit not in self._open:
                shape = (items, *self.result.lead, *extent)
                self._open[unit] = host_zeros(shape, self.result.dtype), items * math.prod(extent)
            buffer, missing = self._open[unit]
            common = [
                slice(max(a.start, b.start), min(a.stop, b.stop))
                for a, b in zip(released.region, place, strict=True)
            ]
            if not hollow:
                target = _shifted(common, place)
                source = _shifted(common, released.region)
                buffer[released.item - first][last_axes(target)] = released.block[last_axes(source)]
            missing -= math.prod(part.stop - part.start for part in common)
            self._open[unit] = buffer, missing
            if missing == 0:
                del self._open[unit]
                self._close(unit, first, items, place, buffer, hollow=hollow)

    def _close(
        self, unit: int, first: int, items: int, place: Region, buffer: torch.Tensor, *, hollow: bool
    ) -> None:
        if not hollow:
            key: tuple[Any, ...] = (*(slice(None) for _ in self.result.lead), *place)
            if self.result.items is None:
                write_block(self.array, key, buffer[0])
            else:
                write_block(self.array, (slice(first, first + items), *key), buffer)
            self.waiting_bytes += buffer.nbytes
        self._fresh.add(unit)


def _shifted(region: list[slice], origin: Region) -> Region:
    return tuple(
        slice(part.start - at.start, part.stop - at.start) for part, at in zip(region, origin, strict=True)
    )


def make_store(array: Any, result: ResultShape, geometry: Geometry, stored: Iterable[int] = ()) -> TileStore:
    """The store for an array: by shards where it has some (zarr), else plain."""
    shard = getattr(array, "shards", None) or getattr(array, "chunks", None)
    if (
        isinstance(shard, tuple)
        and len(shard) == len(result.shape)
        and all(isinstance(n, int) for n in shard)
    ):
        return ShardStore(array, result, geometry, stored, shard=shard)
    return PlainStore(array, result, geometry, stored)
