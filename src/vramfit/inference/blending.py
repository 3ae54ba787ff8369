"""How much each value of a tile weighs where tiles overlap."""

from __future__ import annotations

import functools
import math
import operator

import torch

from vramfit.inference.tile_settings import Blend

_LEAST = 1e-3
"""Smallest weight, unless all are smaller: sums of weights are divided by."""


def weights(
    tile: tuple[int, ...], blend: Blend, sigma: tuple[float, ...], dtype: torch.dtype
) -> torch.Tensor | None:
    """Weights of a tile, of its shape, on the CPU; None where all are one.

    Gaussian weights are those of MONAI's ``compute_importance_map``, bit for bit: the product of one Gaussian an axis
    in float32, from below bounded by a thousandth (or by their own least, if that is larger), then in `dtype`.

    Args:
        tile: its length along each axis.
        blend: the kind of weights.
        sigma: standard deviation of the Gaussian along each axis, as a share of the tile.
        dtype: what results are added up in.
    """
    if blend is Blend.CONSTANT:
        return None
    if blend is Blend.GAUSSIAN:
        lines = [_gaussian(size, share * size) for size, share in zip(tile, sigma, strict=True)]
    else:
        lines = [_raised_cosine(size) for size in tile]
    product: torch.Tensor = functools.reduce(lambda one, line: operator.mul(one.unsqueeze(-1), line), lines)
    return product.clamp_(min=max(float(product.min()), _LEAST)).to(dtype)


def _gaussian(size: int, sigma: float) -> torch.Tensor:
    places = torch.arange(size, dtype=torch.float32) - (size - 1) / 2.0
    return torch.exp(places**2 / (-2 * sigma**2))


def _raised_cosine(size: int) -> torch.Tensor:
    """A Hann window that is nowhere zero: its samples lie in the middles of `size` equal parts."""
    places = (torch.arange(size, dtype=torch.float32) + 0.5) * (math.pi / size)
    return torch.sin(places) ** 2
