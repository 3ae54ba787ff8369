"""How a picture or volume is cut into tiles and put together again."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

from vramfit.errors import UsageError

Extents: TypeAlias = int | tuple[int | None, ...]
"""One length for every spatial axis, or one an axis."""


class Blend(Enum):
    """How much each value of a tile weighs where tiles overlap.

    Attributes:
        CONSTANT: all the same.
        GAUSSIAN: a Gaussian around the tile's middle, at least a thousandth.
        COSINE: a raised cosine (Hann) along each axis, at least a thousandth.
    """

    CONSTANT = "constant"
    GAUSSIAN = "gaussian"
    COSINE = "cosine"


class Stitch(Enum):
    """Where overlapping tiles are added up.

    Attributes:
        HOST: in the host's memory; the device holds one batch of tiles.
        DEVICE: on the device, in a window as high as a tile and as wide as the picture.
    """

    HOST = "host"
    DEVICE = "device"


class Padding(Enum):
    """What stands beside a picture that is smaller than a blended tile; torch's names (`torch.nn.functional.pad`)."""

    ZEROS = "zeros"
    REFLECT = "reflect"
    REPLICATE = "replicate"
    CIRCULAR = "circular"


@dataclass(frozen=True, kw_only=True, slots=True)
class TileSettings:
    """How tiles are cut and joined.

    There are two kinds of grid. An *exact* one has cores that do not overlap, each computed with a halo around it that
    is cut off afterwards: the result equals the whole run's but for rounding, if the halo covers what a value depends
    on. A *blended* one has an `overlap`, and values there are a weighted mean: another result than the whole run's.

    Attributes:
        tile: what the model is given at once along each axis, halo included; None is the whole axis.
        tile_batch: tiles that the model is given at once.
        halo: of an exact grid, along each axis.
        stride: of an exact grid: tiles begin at its multiples, as the model's own strides (pooling) want it.
        overlap: of a blended grid, as a share of the tile along each axis: from 0 to less than 1.
        blend: the weights of a blended grid.
        sigma: standard deviation of Gaussian weights, as a share of the tile.
        padding: what is put beside a picture that is smaller than a blended tile.
        stitch: where overlapping tiles are added up.
        scale: the result's length over the input's, where it is to be checked; None takes what the first tile gives.
        reduce: what is kept of the result, see `vramfit.inference.reductions`.
        prepare: what a tile becomes before the model gets it, on the device; None brings floating-point numbers and
            those of pictures (8 and 16 bits) to the model's dtype.
    """

    tile: Extents | None = None
    tile_batch: int = 1
    halo: Extents | None = None
    stride: Extents | None = None
    overlap: float | tuple[float, ...] | None = None
    blend: Blend | None = None
    sigma: float | tuple[float, ...] = 0.125
    padding: Padding = Padding.ZEROS
    stitch: Stitch = Stitch.HOST
    scale: Any = None
    reduce: Any = None
    prepare: Any = field(default=None, compare=False)

    @property
    def blended(self) -> bool:
        """Whether tiles overlap and are blended."""
        return self.overlap is not None or self.blend is not None

    def check(self) -> None:
        """Find what contradicts itself.

        Raises:
            UsageError: something does.
        """
        if self.blended and (self.halo is not None or self.stride is not None):
            raise UsageError(
                "a halo is of tiles that do not overlap, and overlap or blend were given too",
                "Give halo for the result of the whole run, or overlap and blend for a weighted mean",
            )
        if type(self.tile_batch) is not int or self.tile_batch < 1:
            raise UsageError(
                f"tile_batch={self.tile_batch!r} is no whole number from 1 on", "Give the tiles of a batch"
            )


def per_axis(name: str, given: Any, count: int, *, least: int) -> tuple[int, ...]:
    """A whole number for each spatial axis.

    Args:
        name: what it is called in errors.
        given: one number, or one an axis.
        count: spatial axes.

    Raises:
        UsageError: there are more or fewer, or one is too small.
    """
    several = isinstance(given, tuple | list)
    values = tuple(given) if several else (given,) * count
    if len(values) != count:
        raise UsageError(
            f"{name}={given!r} has {len(values)} numbers for {count} spatial axes",
            "Give one an axis, or a single one",
        )
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UsageError(f"{name}={given!r} is no whole number from {least} on", "Give another")
    return values


def shares_per_axis(
    name: str, given: Any, count: int, *, most: float, inside: bool = False
) -> tuple[float, ...]:
    """A share for each spatial axis, from 0 to less than `most`; `inside` excludes 0 as well.

    Raises:
        UsageError: there are more or fewer, or one is outside.
    """
    several = isinstance(given, tuple | list)
    values = tuple(given) if several else (given,) * count
    if len(values) != count:
        raise UsageError(
            f"{name}={given!r} has {len(values)} numbers for {count} spatial axes",
            "Give one an axis, or a single one",
        )
    for value in values:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 <= value < most or (inside and value == 0):
            start = "more than 0" if inside else "0"
            raise UsageError(f"{name}={given!r} is not from {start} to less than {most:g}", "Give another")
    return tuple(float(value) for value in values)
