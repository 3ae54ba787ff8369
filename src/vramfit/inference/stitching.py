"""Puts overlapping tiles together in a window that moves down the first axis and lets go of what is complete."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import torch
import torch.nn.functional as F

from vramfit.errors import UsageError
from vramfit.inference.arrays import Region, host_zeros, last_axes
from vramfit.inference.tile_grid import Tile, TileLayout


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Where the results of tiles belong, for one of the model's outputs.

    Attributes:
        layout: the tiles.
        lead: the output's lengths before the spatial axes, without the batch: its channels.
        scale: the output's length over the input's, along each axis. With a single tile along an axis it is of no use.
        length: the whole output's length along each axis, of a padded picture with the padding.
        crop: the part of it that belongs to the picture.
        dtype: of the output's values.
    """

    layout: TileLayout
    lead: tuple[int, ...]
    scale: tuple[Fraction, ...]
    length: tuple[int, ...]
    crop: Region
    dtype: torch.dtype

    @property
    def spatial(self) -> tuple[int, ...]:
        """The result's length along each axis."""
        return tuple(part.stop - part.start for part in self.crop)

    def at(self, axis: int, place: int) -> int:
        """A place of the input along an axis, in the output's steps.

        Raises:
            UsageError: it falls between two of them.
        """
        found = place * self.scale[axis]
        if found.denominator != 1:
            raise UsageError(
                f"a tile that begins or ends at {place} has no whole place in a result of scale "
                f"{self.scale[axis]}",
                f"Give tiles, overlap, halo or stride whose steps are multiples of "
                f"{self.scale[axis].denominator}",
            )
        return found.numerator

    def span(self, axis: int, start: int, stop: int) -> slice:
        """A part of the input along an axis, in the output's steps."""
        tiles = self.layout.axes[axis]
        first = 0 if start == 0 else self.at(axis, start)
        return slice(first, self.length[axis] if stop == tiles[-1].stop else self.at(axis, stop))

    def given(self, tile: Tile) -> Region:
        """Where all that the model gives for a tile lies."""
        return tuple(self.span(axis, one.start, one.stop) for axis, one in enumerate(tile.axes))

    def kept(self, tile: Tile) -> Region:
        """Where the kept part of a tile's result lies."""
        return tuple(self.span(axis, one.keep_start, one.keep_stop) for axis, one in enumerate(tile.axes))

    def core(self, tile: Tile, block: torch.Tensor) -> torch.Tensor:
        """The kept part of a tile's result ``[*lead, *spatial]``."""
        whole, part = self.given(tile), self.kept(tile)
        inner = tuple(slice(k.start - g.start, k.stop - g.start) for g, k in zip(whole, part, strict=True))
        return block[last_axes(inner)]

    def check(self, tile: Tile, block: torch.Tensor) -> None:
        """Make sure that a tile's result ``[*lead, *spatial]`` has the shape that the others let expect.

        Raises:
            UsageError: it has another.
        """
        expected = (*self.lead, *(part.stop - part.start for part in self.given(tile)))
        if tuple(block.shape) != expected:
            raise UsageError(
                f"the model gives {list(block.shape)} for a tile of {list(tile.sizes)}, where the other tiles "
                f"let expect {list(expected)}",
                "Tiles need a model whose result has the input's length times a fixed scale: pad its convolutions",
            )

    @property
    def crop_bounds(self) -> Region:
        """The crop in steps of the result: from 0 on."""
        return tuple(slice(0, size) for size in self.spatial)


@dataclass(frozen=True, slots=True)
class Released:
    """A complete block of a result.

    Attributes:
        item: the example that it belongs to.
        region: where it lies in the result.
        unit: its number among all blocks of its kind (see `vramfit.inference.tile_stores`).
        block: its values ``[*lead, *spatial]``; a view that holds until the window moves on.
        last: whether nothing more of that number follows.
    """

    item: int
    region: Region
    unit: int
    block: torch.Tensor
    last: bool = True

    def pieces(self, nbytes: int) -> Iterator[Released]:
        """The same in pieces along the first spatial axis, of about so many bytes."""
        axis, rows = self.block.dim() - len(self.region), self.region[0]
        count = rows.stop - rows.start
        step = max(1, count * nbytes // max(self.block.nbytes, 1))
        for start in range(0, count, step):
            stop = min(start + step, count)
            region = (slice(rows.start + start, rows.start + stop), *self.region[1:])
            part = self.block.narrow(axis, start, stop - start)
            yield Released(self.item, region, self.unit, part, self.last and stop == count)

    def carrying(self, block: torch.Tensor) -> Released:
        """The same place with other values."""
        return Released(self.item, self.region, self.unit, block, self.last)


class BlendWindow:
    """Weighted sums of overlapping tiles, for as many places as still wait for a tile.

    Tiles come in the order of the layout, so that each value is summed up in the order in which MONAI's
    ``sliding_window_inference`` does it. What no later tile reaches is divided by its sum of weights and given away.

    NOTE [Two sums]: tiles of one row (the same place along the first axis) are added up in a window of a tile's rows
    and columns, which moves along the second axis. What leaves it is complete but for the rows that the next row of
    tiles reaches too: these wait, for the whole width, in another sum, from which that row begins. Both together are a
    fraction of what the picture takes, or a slab of it as high as a tile. With one spatial axis there is the window
    alone; inside, it has a first axis of one step.

    Args:
        geometry: where results belong.
        weights: of a tile of the result, on the device of the sums; None where all are one.
        dtype: of the sums.
        device: where the sums are; None is the host.
    """

    def __init__(
        self,
        geometry: Geometry,
        weights: torch.Tensor | None,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        self.geometry, self.weights = geometry, weights
        self.on_host = device is None
        self._line = len(geometry.length) == 1
        self._lead = len(geometry.lead)
        self._bands = [self._rows(place) for place in range(1 if self._line else geometry.layout.counts[0])]
        first = self._inside(geometry.given(geometry.layout.tile_at(0)))
        self._height, self._width = first[0].stop - first[0].start, first[1].stop - first[1].start
        length = (1, *geometry.length) if self._line else geometry.length
        self._end = length[1]
        shared = max(
            (a.stop - b.start for a, b in zip(self._bands, self._bands[1:], strict=False)), default=0
        )
        self.sums, self.counts = self._zeros((self._height, self._width, *length[2:]), dtype, device)
        self._kept, self._kept_counts = self._zeros((max(shared, 0), *length[1:]), dtype, device)
        self._item = -1
        self._place = self._band = 0
        self._left = self._right = 0  # the window begins there, and tiles were added up to there
        self._begun = (
            -1,
            0,
            0,
        )  # the item, first row and number of the rows that wait for the present row of tiles

    def _zeros(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        whole = (*self.geometry.lead, *shape)
        if device is None:
            return host_zeros(whole, dtype), host_zeros(shape, dtype)
        return torch.zeros(whole, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)

    def _rows(self, place: int) -> slice:
        if self._line:
            return slice(0, 1)
        tile = self.geometry.layout.axes[0][place]
        return self.geometry.span(0, tile.start, tile.stop)

    def _inside(self, region: Region) -> Region:
        return (slice(0, 1), *region) if self._line else region

    @property
    def tile_bytes(self) -> int:
        """Bytes of the result of one tile."""
        sizes = self.geometry.given(self.geometry.layout.tile_at(0))
        return math.prod((*self.geometry.lead, *(one.stop - one.start for one in sizes))) * self.sums.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the sums and of the sums of weights."""
        held = (self.sums, self.counts, self._kept, self._kept_counts)
        return sum(tensor.nbytes for tensor in held)

    def add(self, tile: Tile, block: torch.Tensor, *, hollow: bool = False) -> Iterator[Released]:
        """Add a tile's result; first gives what it completes of the tiles before. `block` is changed.

        Args:
            tile: the next one.
            block: ``[*lead, *spatial]``, in memory of its own.
            hollow: whether it holds no values, so that nothing has to be computed.
        """
        columns = self._inside(self.geometry.given(tile))[1]
        band = 0 if self._line else tile.place[0]
        if (tile.item, band) != (self._item, self._band) or self._right == 0:
            yield from self.finish(hollow=hollow)
            self._begin(tile.item, band, columns.start, hollow=hollow)
        elif columns.start > self._left:
            yield from self._release(columns.start, hollow=hollow)
            self._advance(columns.start, hollow=hollow)
        self._place = tile.place[0]
        self._right = max(self._right, columns.stop)
        if hollow:
            return
        block = block.unsqueeze(self._lead) if self._line else block
        inner: Region = (slice(None), slice(0, columns.stop - columns.start), *self._rest(tile))
        if self.weights is None:
            self.counts[inner] += 1
        else:
            block.mul_(self.weights)
            self.counts[inner] += self.weights
        self.sums[last_axes(inner)] += block

    def _rest(self, tile: Tile) -> Region:
        return self._inside(self.geometry.given(tile))[2:]

    def finish(self, *, hollow: bool = False) -> Iterator[Released]:
        """Give the rest of the present row of tiles away."""
        if self._right:
            yield from self._release(self._right, hollow=hollow)
            rows = self._bands[self._band]
            following = self._following
            shared = 0 if following is None else rows.stop - following
            self._begun = (self._item, following or 0, max(shared, 0))
            self._right = 0

    @property
    def _following(self) -> int | None:
        """The first row of the next row of tiles; None after the last."""
        return self._bands[self._band + 1].start if self._band + 1 < len(self._bands) else None

    def _begin(self, item: int, band: int, left: int, *, hollow: bool) -> None:
        self._item, self._band, self._left = item, band, left
        if self._begun[:2] != (item, self._bands[band].start):
            self._begun = (item, 0, 0)  # the row of tiles before was not computed, as all of it is stored
        if not hollow:
            self.sums.zero_()
            self.counts.zero_()
            self._take_up(left)

    def _take_up(self, start: int) -> None:
        """Begin the columns from `start` to the window's end with what the row of tiles before left."""
        stop, count = min(self._left + self._width, self._end), self._begun[2]
        if count and start < stop:
            inner = (slice(0, count), slice(start - self._left, stop - self._left))
            outer = (slice(0, count), slice(start, stop))
            axes = self.counts.dim() - 2
            self.sums[
                last_axes(
                    (
                        *inner,
                        *_ALL[:axes],
                    )
                )
            ] = self._kept[
                last_axes(
                    (
                        *outer,
                        *_ALL[:axes],
                    )
                )
            ]
            self.counts[inner] = self._kept_counts[outer]

    def _advance(self, left: int, *, hollow: bool) -> None:
        entered, self._left = self._left + self._width, left
        if not hollow:
            count = left - (entered - self._width)
            _move_up(self.sums, self._lead + 1, count)
            _move_up(self.counts, 1, count)
            self._take_up(max(entered, left))

    def _release(self, until: int, *, hollow: bool) -> Iterator[Released]:
        """Give the window's columns before `until` away; rows that the next row of tiles reaches wait for it."""
        stop = min(until, self._right)
        rows, following = self._bands[self._band], self._following
        whole = self._height if following is None else min(following - rows.start, self._height)
        width = slice(0, stop - self._left)
        rest = _ALL[: self.counts.dim() - 2]
        if not hollow:
            done = self.sums[
                last_axes(
                    (
                        slice(0, whole),
                        width,
                        *rest,
                    )
                )
            ]
            done /= self.counts[:whole, width]
            if whole < self._height:
                kept = (slice(0, self._height - whole), slice(self._left, stop), *rest)
                inner = (slice(whole, None), width, *rest)
                self._kept[last_axes(kept)] = self.sums[last_axes(inner)]
                self._kept_counts[kept] = self.counts[inner]
        yield from self._cropped(slice(rows.start, rows.start + whole), slice(self._left, stop))

    def _cropped(self, rows: slice, columns: slice) -> Iterator[Released]:
        """What is complete, as far as it belongs to the picture."""
        crop = self._inside(self.geometry.crop)
        common = [
            slice(max(part.start, edge.start), min(part.stop, edge.stop))
            for part, edge in zip((rows, columns), crop, strict=False)
        ]
        if any(part.start >= part.stop for part in common):
            return
        inner = tuple(
            slice(part.start - start, part.stop - start)
            for part, start in zip(common, (rows.start, columns.start), strict=True)
        )
        block = self.sums[
            last_axes(
                (
                    *inner,
                    *crop[2:],
                )
            )
        ]
        region = (
            *(
                slice(part.start - edge.start, part.stop - edge.start)
                for part, edge in zip(common, crop, strict=False)
            ),
            *self._inside(self.geometry.crop_bounds)[2:],
        )
        if self._line:
            block, region = block.squeeze(self._lead), region[1:]
        unit = self._item * self.geometry.layout.counts[0] + self._place
        last = self._line or common[1].stop == min(crop[1].stop, self._end)
        yield Released(self._item, region, unit, block, last)


_ALL = (slice(None), slice(None), slice(None))


def _move_up(rows: torch.Tensor, axis: int, count: int) -> None:
    """Move what follows the first `count` rows to the front, and zero the rest; in steps that do not overlap."""
    size = rows.shape[axis]
    if count >= size:
        rows.zero_()
        return
    for start in range(count, size, count):
        length = min(count, size - start)
        rows.narrow(axis, start - count, length).copy_(rows.narrow(axis, start, length))
    rest = min(count, size)
    rows.narrow(axis, size - rest, rest).zero_()


def scaled_weights(weights: torch.Tensor | None, sizes: tuple[int, ...]) -> torch.Tensor | None:
    """Weights of a tile of the result, from those of a tile of the input: the nearest, as MONAI takes them."""
    if weights is None or tuple(weights.shape) == sizes:
        return weights
    return F.interpolate(weights[None, None], sizes, mode="nearest-exact")[0, 0]
