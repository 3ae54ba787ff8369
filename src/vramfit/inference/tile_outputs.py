"""What a model makes of tiles: its outputs, where each belongs, and what is kept of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch

from vramfit.arguments import shown
from vramfit.errors import UsageError
from vramfit.inference.blending import weights
from vramfit.inference.reductions import OnTheFly, as_reduction, flattened
from vramfit.inference.stitching import BlendWindow, Geometry, scaled_weights
from vramfit.inference.tile_grid import Tile, TileLayout
from vramfit.inference.tile_settings import Blend, Stitch, TileSettings, shares_per_axis
from vramfit.inference.tile_stores import ResultShape, TileStore

Pack = Callable[[list[Any]], Any]


@dataclass(kw_only=True)
class OutputPlan:
    """One of the model's outputs.

    Attributes:
        geometry: where its tiles belong.
        reduction: what is kept of it.
        results: what the reduction gives, one after another; one without a reduction.
        pack: puts as many values into the reduction's tuple or dict.
        window: where overlapping tiles are added up; None in an exact grid.
        stores: where the results are kept, once they are open.
    """

    geometry: Geometry
    reduction: OnTheFly | None
    results: list[ResultShape]
    pack: Pack
    window: BlendWindow | None
    stores: list[TileStore]


def plan_outputs(
    tile: Tile,
    outputs: Sequence[torch.Tensor],
    keys: Sequence[Any],
    settings: TileSettings,
    layout: TileLayout,
    run: PlanContext,
) -> list[OutputPlan]:
    """Plan the outputs by what the first tile gave.

    Args:
        tile: the first of the layout.
        outputs: its results, a batch each: ``[1, *lead, *spatial]``.
        keys: what each is called, or its number.
        settings: how tiles are joined.
        layout: all tiles.
        run: what else the plan depends on.

    Raises:
        UsageError: results cannot be put together.
    """
    reductions = _reductions(settings.reduce, keys)
    found = []
    for number, (output, reduction) in enumerate(zip(outputs, reductions, strict=True)):
        geometry = _geometry(tile, output, settings, layout, lambda number=number: run.corner(number))  # type: ignore[misc]
        sums = run.sums_dtype if run.sums_dtype is not None else output.dtype
        if layout.blended:
            geometry = replace(geometry, dtype=sums)
        sample = output[:1].narrow(output.dim() - len(layout.spatial), 0, 1).to(geometry.dtype)
        kept, pack = flattened(sample if reduction is None else reduction(sample))
        axes = len(layout.spatial)
        results = []
        for part in kept:
            if tuple(part.shape[part.dim() - axes :]) != tuple(sample.shape[sample.dim() - axes :]):
                raise UsageError(
                    f"reduce gives {list(part.shape)} for {list(sample.shape)}: it changes the places",
                    "Let it treat each place by itself, over axis 1",
                )
            results.append(
                ResultShape(
                    items=run.items,
                    lead=tuple(part.shape[1 : part.dim() - axes]),
                    spatial=geometry.spatial,
                    dtype=part.dtype,
                )
            )
        window = None
        if layout.blended:
            window = _window(tile, output, geometry, settings, sums)
        found.append(
            OutputPlan(
                geometry=geometry, reduction=reduction, results=results, pack=pack, window=window, stores=[]
            )
        )
    return found


@dataclass(frozen=True, kw_only=True)
class PlanContext:
    """What a plan of outputs depends on beside the first tile.

    Attributes:
        items: examples of the input; None without a batch axis.
        sums_dtype: what overlapping tiles are added up in; None is each output's own.
        corner: gives the shape of an output for the last tile of an example, ``[1, *lead, *spatial]``.
    """

    items: int | None
    sums_dtype: torch.dtype | None
    corner: Callable[[int], tuple[int, ...]]


def _window(
    tile: Tile, output: torch.Tensor, geometry: Geometry, settings: TileSettings, dtype: torch.dtype
) -> BlendWindow:
    axes = len(geometry.length)
    blend = settings.blend or Blend.CONSTANT
    sigma = shares_per_axis("sigma", settings.sigma, axes, most=float("inf"), inside=True)
    of_tile = scaled_weights(
        weights(tile.sizes, blend, sigma, dtype), tuple(output.shape[output.dim() - axes :])
    )
    on_device = settings.stitch is Stitch.DEVICE and output.device.type != "cpu"
    device = output.device if on_device else None
    if of_tile is not None and device is not None:
        of_tile = of_tile.to(device)
    return BlendWindow(geometry, of_tile, dtype, device)


def _geometry(
    tile: Tile,
    output: torch.Tensor,
    settings: TileSettings,
    layout: TileLayout,
    corner: Callable[[], tuple[int, ...]],
) -> Geometry:
    axes = len(layout.spatial)
    if output.dim() < axes + 1 or output.shape[0] != 1:
        raise UsageError(
            f"the model gives {list(output.shape)} for one tile of {list(tile.sizes)}: its places are lost",
            "Tiles need a result with the batch first and the spatial axes last",
        )
    sizes = tuple(output.shape[output.dim() - axes :])
    scales = _scales(tile, sizes, settings, layout)
    length: list[int] = []
    last: tuple[int, ...] | None = None
    for axis, (scale, size) in enumerate(zip(scales, sizes, strict=True)):
        tiles = layout.axes[axis]
        whole = tiles[-1].stop * scale
        if len(tiles) == 1:
            length.append(size)
        elif layout.blended or (whole.denominator == 1 and layout.spatial[axis] % layout.stride[axis] == 0):
            length.append(int(whole))
        else:  # a length that the model's strides do not divide: it says whether it rounds up or down
            last = corner() if last is None else last
            length.append(int(tiles[-1].start * scale) + last[len(last) - axes + axis])
    crop = tuple(
        slice(round(before * scale), round((before + size) * scale)) if before or after else slice(0, end)
        for (before, after), size, scale, end in zip(
            layout.padding, layout.spatial, scales, length, strict=True
        )
    )
    return Geometry(
        layout=layout,
        lead=tuple(output.shape[1 : output.dim() - axes]),
        scale=scales,
        length=tuple(length),
        crop=crop,
        dtype=output.dtype,
    )


def _scales(
    tile: Tile, sizes: tuple[int, ...], settings: TileSettings, layout: TileLayout
) -> tuple[Fraction, ...]:
    """The output's length over the input's along each axis, from the first tile."""
    found = tuple(Fraction(size, given) for size, given in zip(sizes, tile.sizes, strict=True))
    wanted = _given_scale(settings.scale, len(sizes))
    for axis, (scale, size) in enumerate(zip(found, sizes, strict=True)):
        said = f"the model gives {size} for a tile of {tile.sizes[axis]}"
        if wanted is not None and scale != wanted[axis]:
            raise UsageError(
                f"{said}, which is not a scale of {wanted[axis]}",
                "Leave scale out to take what the model gives",
            )
        fraction = scale.numerator != 1 and scale.denominator != 1
        if len(layout.axes[axis]) > 1 and size <= 1 and wanted is None:
            raise UsageError(
                f"{said}: a model that needs its whole input cannot be given tiles of it",
                "Run it whole, or its local part alone",
            )
        if len(layout.axes[axis]) > 1 and fraction and wanted is None:
            raise UsageError(
                f"{said}: is that a scale of {scale}, or are edges cut off?",
                f"Give scale={str(scale)!r} if it is one; a model that cuts edges off has to pad its convolutions",
            )
    return found


def _given_scale(given: Any, axes: int) -> tuple[Fraction, ...] | None:
    if given is None:
        return None
    several = tuple(given) if isinstance(given, tuple | list) else (given,) * axes
    try:
        found = tuple(Fraction(one).limit_denominator(1 << 16) for one in several)
    except (TypeError, ValueError, ZeroDivisionError, OverflowError):
        found = ()
    if len(found) != axes or min(found) <= 0:
        raise UsageError(
            f"scale={shown(given)} is no scale for {axes} spatial axes",
            'Give a number, or "1/2", or one an axis',
        )
    return found


def _reductions(given: Any, keys: Sequence[Any]) -> list[OnTheFly | None]:
    """A reduction for each output: the same one, or those of a dict or tuple by the outputs' keys or places.

    Raises:
        UsageError: there is one for an output that is not there.
    """
    if isinstance(given, Mapping):
        for key in given:
            if key not in keys:
                raise UsageError(
                    f"reduce has a {key!r}, which the model does not give",
                    f"It gives {', '.join(map(str, keys))}",
                )
        return [as_reduction(given.get(key)) for key in keys]
    if isinstance(given, tuple | list):
        if len(given) != len(keys):
            raise UsageError(
                f"reduce has {len(given)} entries for {len(keys)} outputs",
                "Give one an output, None to leave it",
            )
        return [as_reduction(one) for one in given]
    return [as_reduction(given)] * len(keys)
