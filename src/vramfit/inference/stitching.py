"""Puts overlapping tiles together in a window that moves down the first axis and lets go of what is complete."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import torch
import torch.nn.functional as F

from vramfit.errors import UsageError
from vramfit.inference.arrays import Region, host_zeros
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
        inner = tuple(
            slice(k.start - g.start, k.stop - g.start) for g, k in zip(whole, part, strict=True)
        )
        return block[(..., *inner)]

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
    """Weighted sums of overlapping tiles, as high as a tile along the first axis and as wide as the picture.

    Tiles come in the order of the layout, so that each value is summed up in the order in which MONAI's
    ``sliding_window_inference`` does it. Rows that no later tile reaches are divided by the sum of their weights and
    given away, and the rest moves up.

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
        length = geometry.length
        first = geometry.layout.axes[0]
        rows = max(
            (geometry.span(0, one.start, one.stop).stop - geometry.span(0, one.start, one.stop).start)
            for one in first
        )
        self.on_host = device is None
        shape = (*geometry.lead, rows, *length[1:])
        self.sums = self._zeros(shape, dtype, device)
        self.counts = self._zeros((rows, *length[1:]), dtype, device)
        self._row_axis = len(geometry.lead)
        self._item: int | None = None
        self._origin = 0
        self._filled = 0
        self._place = 0

    @staticmethod
    def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None) -> torch.Tensor:
        if device is None:
            return host_zeros(shape, dtype)
        return torch.zeros(shape, dtype=dtype, device=device)

    @property
    def tile_bytes(self) -> int:
        """Bytes of the result of one tile."""
        sizes = self.geometry.given(self.geometry.layout.tile_at(0))
        return math.prod((*self.geometry.lead, *(one.stop - one.start for one in sizes))) * self.sums.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the sums and of the sums of weights."""
        return self.sums.nbytes + self.counts.nbytes

    def add(self, tile: Tile, block: torch.Tensor, *, hollow: bool = False) -> Iterator[Released]:
        """Add a tile's result; first gives what it completes of the tiles before. `block` is changed.

        Args:
            tile: the next one.
            block: ``[*lead, *spatial]``, in memory of its own.
            hollow: whether it holds no values, so that nothing has to be computed.
        """
        region = self.geometry.given(tile)
        rows = region[0]
        if tile.item != self._item:
            yield from self.finish(hollow=hollow)  # which leaves zeros
            self._item, self._origin, self._filled, self._place = tile.item, rows.start, 0, tile.place[0]
        if rows.start > self._origin:
            yield from self._release(rows.start, hollow=hollow)
            self._place = tile.place[0]
        inner = (slice(rows.start - self._origin, rows.stop - self._origin), *region[1:])
        self._filled = max(self._filled, rows.stop - self._origin)
        if hollow:
            return
        if self.weights is None:
            self.counts[inner] += 1
        else:
            block.mul_(self.weights)
            self.counts[inner] += self.weights
        self.sums[(..., *inner)] += block

    def finish(self, *, hollow: bool = False) -> Iterator[Released]:
        """Give the rest of the present example away."""
        if self._item is not None:
            yield from self._release(self._origin + self._filled, hollow=hollow)
            self._item = None

    def _release(self, until: int, *, hollow: bool) -> Iterator[Released]:
        """Give the rows before `until` away, and move the rest up."""
        count = until - self._origin
        crop = self.geometry.crop
        start, stop = max(self._origin, crop[0].start), min(until, crop[0].stop)
        done = self.sums.narrow(self._row_axis, 0, count)
        if start < stop:
            if not hollow:
                done /= self.counts[:count]
            inner = (slice(start - self._origin, stop - self._origin), *crop[1:])
            region = (
                slice(start - crop[0].start, stop - crop[0].start),
                *self.geometry.crop_bounds[1:],
            )
            assert self._item is not None
            unit = self._item * self.geometry.layout.counts[0] + self._place
            yield Released(self._item, region, unit, self.sums[(..., *inner)])
        if not hollow:
            _move_up(self.sums, self._row_axis, count)
            _move_up(self.counts, 0, count)
        self._origin, self._filled = until, self._filled - count


def _move_up(rows: torch.Tensor, axis: int, count: int) -> None:
    """Move what follows the first `count` rows to the front, and zero the rest; in steps that do not overlap."""
    size = rows.shape[axis]
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

