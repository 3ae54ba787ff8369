"""How what a tile keeps is compared with the same part of a run over more than the tile."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import torch

from vramfit.inference.tile_grid import AxisTile


@dataclass(frozen=True)
class TriedTile:
    """A tile that is tried.

    Attributes:
        place: the tile, along each axis.
        given: its values, halo included.
        alone: what the model gives for it alone.
    """

    place: tuple[AxisTile, ...]
    given: torch.Tensor
    alone: list[torch.Tensor]


def region_of(place: tuple[AxisTile, ...]) -> tuple[slice, ...]:
    """Where a tile with its halo lies."""
    return tuple(slice(axis.start, axis.stop) for axis in place)


def scales_of(output: torch.Tensor, place: tuple[AxisTile, ...]) -> tuple[Fraction, ...]:
    """Output steps for each of the input, of a tile whose length the stride divides."""
    lengths = output.shape[-len(place) :]
    return tuple(Fraction(length, axis.size) for length, axis in zip(lengths, place, strict=False))


def kept_part(
    output: torch.Tensor,
    place: tuple[AxisTile, ...],
    scales: tuple[Fraction, ...],
    sizes: tuple[int, ...],
    *,
    alone: bool = False,
) -> torch.Tensor:
    """What a tile keeps, cut from a run over the whole part or over the tile alone."""
    index = []
    for axis, scale, size in zip(place, scales, sizes, strict=True):
        origin = int(axis.start * scale) if alone else 0
        last = None if axis.keep_stop == size else int(axis.keep_stop * scale) - origin
        index.append(slice(int(axis.keep_start * scale) - origin, last))
    return output[(..., *index)]


def difference_of(one: torch.Tensor, other: torch.Tensor, whole: torch.Tensor) -> float:
    """How far two results are apart: of whole numbers the share that differs, else as a share of the largest value."""
    if one.shape != other.shape:
        return float("inf")
    if not one.numel():
        return 0.0
    if not (one.is_floating_point() or one.is_complex()):
        return float((one != other).double().mean())
    wide = torch.complex128 if one.is_complex() else torch.float64
    one, other = one.to(wide), other.to(wide)
    same = (one == other) | (one.isnan() & other.isnan())
    gap = torch.where(same, 0.0, (one - other).abs()).nan_to_num(float("inf"))
    size = whole.abs().double()
    largest = float(size[size.isfinite()].max()) if bool(size.isfinite().any()) else 0.0
    return float(gap.max()) / max(largest, 1e-30)


def short_text(values: tuple[int, ...]) -> str:
    """One number where all are equal."""
    return str(values[0]) if len(set(values)) == 1 else str(values)
