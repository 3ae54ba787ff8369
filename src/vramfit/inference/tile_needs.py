"""What tiles a model needs: how far a value of its result sees, and at which steps its tiles may begin."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.inference.receptive_field import USUAL_SECONDS, LocalityKind, probe

_EXAMPLE = {1: 512, 2: 128, 3: 64}
"""Length of the input that a model is probed with, by spatial axes."""

_CONVOLUTIONS = {
    nn.Conv1d: 1,
    nn.Conv2d: 2,
    nn.Conv3d: 3,
    nn.ConvTranspose1d: 1,
    nn.ConvTranspose2d: 2,
    nn.ConvTranspose3d: 3,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TileNeeds:
    """What tiles of an exact grid need.

    Attributes:
        halo: along each axis, in steps of the input.
        stride: tiles begin at its multiples.
    """

    halo: tuple[int, ...]
    stride: tuple[int, ...]


def probe_needs(
    model: Any, channels: int, axes: int, device: torch.device, *, seconds: float | None = None
) -> TileNeeds:
    """What a model's tiles need, from a probe of the model.

    Args:
        model: on the device.
        channels: of its input.
        axes: spatial axes.
        seconds: how long the probe may take; None for 30.

    Raises:
        UsageError: a value of the result depends on the whole input, or there was not enough time to know.
    """
    example = torch.zeros(1, channels, *(_EXAMPLE[axes],) * axes, dtype=_dtype_of(model), device=device)
    locality = probe(model, example, seconds=USUAL_SECONDS if seconds is None else seconds)
    if not locality.complete:
        raise UsageError(
            f"what tiles of this model need could not be found: {locality.why}",
            "Pass more seconds=, the halo and the stride themselves, or overlap= for tiles that are blended",
        )
    if locality.kind is not LocalityKind.LOCAL:
        why = f" ({locality.why})" if locality.why else ""
        raise UsageError(
            f"a value of the model's result depends on more than its surroundings{why}: no halo is enough for tiles",
            "Pass overlap= for tiles that are blended, which is another result; or run it layer by layer",
        )
    if any(rows for output in locality.shrink for rows in output):
        raise UsageError(
            "the model cuts edges off: its result is shorter than its input's length times a scale",
            "Pad its convolutions",
        )
    if locality.mixes_batch:
        raise UsageError(
            "an example's result depends on the other examples of its batch", "Call model.eval() first"
        )
    return TileNeeds(halo=tuple(map(max, locality.halo)), stride=tuple(locality.alignment))


def _dtype_of(model: Any) -> torch.dtype:
    """The dtype of a model's first parameter that is no integer: what its convolutions take."""
    if isinstance(model, nn.Module):
        for parameter in model.parameters():
            if parameter.is_floating_point() or parameter.is_complex():
                return parameter.dtype
    return torch.float32


def convolution_axes(model: Any) -> int:
    """Spatial axes of a model's convolutions; 0 where it has none, or of several kinds."""
    if not isinstance(model, nn.Module):
        return 0
    found = {
        axes for module in model.modules() for kind, axes in _CONVOLUTIONS.items() if isinstance(module, kind)
    }
    return found.pop() if len(found) == 1 else 0


def input_channels(model: nn.Module) -> int:
    """Channels that the first of a model's convolutions takes; 0 where it has none."""
    for module in model.modules():
        if isinstance(module, tuple(_CONVOLUTIONS)):
            return int(vars(module)["in_channels"])
    return 0


def strides_by_modules(model: Any, axes: int) -> tuple[int, ...]:
    """A multiple of a model's total stride along each axis: the product of the strides of its modules.

    Branches side by side count twice, which makes tiles begin at coarser steps than they would have to. What a model
    strides by without a module for it (``x[..., ::2]``, ``F.max_pool2d``) is not seen.

    Args:
        axes: spatial axes.
    """
    product = [1] * axes
    for module in model.modules() if isinstance(model, nn.Module) else ():
        steps = _steps_of(module)
        # Of modules with other axes than the input's it is not known which of its axes they stride along.
        along = steps if len(steps) == axes else (math.lcm(*steps),) * axes
        product = [one * step for one, step in zip(product, along, strict=True)]
    return tuple(product)


def _steps_of(module: nn.Module) -> tuple[int, ...]:
    """By how many steps of its input a module moves on for each of its output, along each axis or along all."""
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) or "Pool" in type(module).__name__:
        given = getattr(module, "stride", 1)
        given = getattr(module, "kernel_size", 1) if given is None else given  # torch's LPPool keeps the None
    elif isinstance(module, nn.PixelUnshuffle):
        given = module.downscale_factor
    elif isinstance(module, nn.Upsample) and module.scale_factor is not None:
        scale = module.scale_factor
        several = scale if isinstance(scale, tuple) else (scale,)
        given = tuple(Fraction(one).limit_denominator(1 << 10).denominator for one in several)
    else:
        given = 1
    values = given if isinstance(given, tuple) else (given,)
    return tuple(one if isinstance(one, int) else 1 for one in values) or (1,)
