"""What the check of tiles puts in a tile and beyond it: values like the input's, and changes of what lies outside."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch

from vramfit.inference.arrays import read_block

_SAMPLE = 64
"""Steps along each axis of what is read of the input to know which values it holds."""

_DARK = 0.02
"""What every other tile is scaled by, so that the brightest value of the whole is not in each of them."""


class OutsideValues(Enum):
    """How everything beyond a tile is replaced."""

    NOISE = "noise"
    SCALED = "four times the values"
    SHIFTED = "shifted values"
    HIGH = "saturated values"
    LOW = "the lowest values"


class TrialValues:
    """Inputs with the values of an array.

    Args:
        source: the array ``[B, C, *spatial]`` or ``[C, *spatial]``, of which a few parts are read.
        batched: whether its first axis is the batch.
        axes: spatial axes.
        exact: whether floating-point numbers are made in float64.
    """

    def __init__(self, source: Any, *, batched: bool, axes: int, exact: bool) -> None:
        shape = tuple(int(size) for size in source.shape)
        self.channels = shape[len(shape) - axes - 1]
        parts = []
        for middle in (False, True):
            starts = [middle * max(0, (size - _SAMPLE) // 2) for size in shape[len(shape) - axes :]]
            region = [slice(start, start + _SAMPLE) for start in starts]
            parts.append(
                read_block(source, (*([0] if batched else []), slice(None), *region)).detach().cpu().flatten()
            )
        seen = torch.cat(parts)
        self.dtype = seen.dtype
        self.floating = self.dtype.is_floating_point
        if self.floating and exact:
            self.dtype = torch.float64
        seen = seen.to(self.dtype)
        self._counts = not self.floating and not seen.is_complex() and self.dtype not in _BRIGHTNESS
        self._tokens = seen.unique() if self._counts else seen
        known = seen[seen.isfinite()].double() if not seen.is_complex() else seen.abs().double()
        low, high = (float(known.min()), float(known.max())) if known.numel() else (0.0, 0.0)
        self.low, self.high = (low, high) if high > low else (-1.0, 1.0) if self.floating else (0.0, 255.0)
        self._generator = torch.Generator().manual_seed(0)

    def base(self, sizes: Sequence[int], examples: int = 1) -> torch.Tensor:
        """An input of these spatial sizes."""
        shape = (examples, self.channels, *sizes)
        drawn = torch.rand(shape, generator=self._generator, dtype=torch.float64)
        if self._counts:
            return self._tokens[(drawn * len(self._tokens)).long().clamp_(max=len(self._tokens) - 1)]
        return self._fitted(self.low + (self.high - self.low) * drawn)

    def tile(self, whole: torch.Tensor, region: tuple[slice, ...], *, dark: bool) -> torch.Tensor:
        """A tile of an input, dark or as it is."""
        part = whole[(slice(None), slice(None), *region)]
        if self._counts or not dark:
            return part.clone()
        return self._fitted(part * _DARK if part.is_complex() else part.double() * _DARK)

    def beyond(self, whole: torch.Tensor, how: OutsideValues) -> torch.Tensor:
        """An input of the same sizes with other values everywhere."""
        if self._counts:
            lowest = {OutsideValues.HIGH: self._tokens.max(), OutsideValues.LOW: self._tokens.min()}.get(how)
            return self.base(whole.shape[2:]) if lowest is None else lowest.expand(whole.shape).clone()
        spread = self.high - self.low
        values = whole if whole.is_complex() else whole.double()
        if how is OutsideValues.NOISE:
            return self.base(whole.shape[2:])
        if how is OutsideValues.SCALED:
            return self._fitted(values * 4)
        if how is OutsideValues.SHIFTED:
            return self._fitted(values + 2 * spread)
        return self._fitted(
            torch.full_like(values, self.high + spread if how is OutsideValues.HIGH else self.low - spread)
        )

    def _fitted(self, values: torch.Tensor) -> torch.Tensor:
        if self.dtype.is_floating_point or self.dtype.is_complex:
            return values.to(self.dtype)
        if self.dtype is torch.bool:
            return values > (self.low + self.high) / 2
        limits = torch.iinfo(self.dtype)
        return values.round().clamp(limits.min, limits.max).to(self.dtype)


_BRIGHTNESS = (torch.uint8, torch.int8, torch.uint16, torch.int16, torch.bool)
"""Dtypes whose values may be made up; other integers may be indices, of which only those that were seen are valid."""
