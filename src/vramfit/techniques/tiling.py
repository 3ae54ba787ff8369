"""Pictures and volumes tile by tile, from the host and back to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.inference.tile_needs import convolution_axes, input_channels, probe_needs
from vramfit.inference.tile_settings import Blend, Stitch, TileSettings
from vramfit.inference.tiled_inference import job_of_module, run_job
from vramfit.techniques.core.attached_program import AttachedProgram, AttachStage
from vramfit.techniques.core.model_profile import Profile
from vramfit.techniques.core.technique import Numerics, Promise, Setting, Technique

_SMALLEST = {1: 256, 2: 64, 3: 32}
"""Shortest tile that is tried, by spatial axes: in smaller ones the halo is most of the work."""
_STEP = 16
"""Tiles are multiples of it where they may be, which kernels like."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TilingSetting(Setting):
    """How an input is cut.

    Attributes:
        tile: what the model is given at once along each spatial axis, halo included.
        batch: tiles that the model is given at once.
        halo: what is computed on each side of a tile and cut off.
        stride: tiles begin at its multiples.
        overlap: share of a tile that it has in common with its neighbour, in place of a halo; negative for none.
        blend: the weights where tiles overlap.
        stitch: where overlapping tiles are added up.
    """

    tile: tuple[int, ...]
    batch: int = 1
    halo: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    overlap: float = -1.0
    blend: Blend = Blend.CONSTANT
    stitch: Stitch = Stitch.HOST

    @property
    def blended(self) -> bool:
        """Whether tiles overlap."""
        return self.overlap >= 0

    def settings(self) -> TileSettings:
        """The same, as `vramfit.inference` takes it."""
        if self.blended:
            return TileSettings(
                tile=self.tile,
                tile_batch=self.batch,
                overlap=self.overlap,
                blend=self.blend,
                stitch=self.stitch,
                prepare=_as_it_is,
            )
        return TileSettings(
            tile=self.tile,
            tile_batch=self.batch,
            halo=self.halo or (0,) * len(self.tile),
            stride=self.stride or (1,) * len(self.tile),
            prepare=_as_it_is,
        )


class Tiling(Technique[TilingSetting]):
    """Runs a model without a loss tile by tile: the device holds one tile's activations in place of the picture's.

    The input stays on the host and is uploaded tile by tile; results leave as they are complete, and what the model
    returns is on the host. With a halo, of cores that do not overlap, results are those of the whole run but for
    rounding; the halo has to cover what a value depends on, as the probe of a model finds it. A model that looks at its
    whole input (attention over it, group or instance norms, squeeze and excitation) has no such halo. With an overlap
    in its place, values where tiles overlap are weighted means, which is another result.

    The price is the halo's share of the work: along each axis, tile / (tile - 2 halo). It pays wherever activations are
    most of the peak; parameters are not made less.
    """

    name: ClassVar[str] = "tiling"
    summary: ClassVar[str] = "runs a picture or volume tile by tile"
    numerics: ClassVar[Numerics] = Numerics.APPROXIMATE
    phase: ClassVar[AttachStage] = AttachStage.CONTEXT
    setting_type = TilingSetting
    follows: ClassVar[str | None] = "compile"
    excludes: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "input-chunking": "both decide which part of the input is on the device; tiles take examples one by one"
        }
    )

    def options(self, profile: Profile) -> Iterable[TilingSetting]:
        """Squares and cubes, each half as long as the one before, for local models of pictures that do not train."""
        axes = convolution_axes(profile.model)
        if profile.trains or axes == 0:
            return
        try:
            # The profile's model may be of a virtual card that is gone: its structure is what counts.
            found = probe_needs(profile.model, input_channels(profile.model), axes, torch.device("cpu"))
        except UsageError:
            return
        for length in _ladder(max(profile.sizes.values()), axes):
            tile = tuple(-(-length // step) * step for step in found.stride)
            if all(size - 2 * halo >= size // 4 for size, halo in zip(tile, found.halo, strict=True)):
                yield TilingSetting(tile=tile, halo=found.halo, stride=found.stride)

    def promise(self, setting: TilingSetting) -> Promise:
        """Rounding with a halo, another result with an overlap."""
        if setting.blended:
            return Promise(Numerics.APPROXIMATE, "values are weighted means where tiles overlap")
        return Promise(
            Numerics.ROUNDING,
            "convolutions of other sizes run in other kernels, which may sum in another order",
        )

    def attach(self, live: AttachedProgram, setting: TilingSetting) -> None:
        """Keep inputs on the host, and surround the model.

        Raises:
            UsageError: the model has no convolutions, or others than the tile has axes.
        """
        axes = convolution_axes(live.model)
        if axes == 0:
            raise UsageError(
                "the model has no convolutions of one kind, so that its spatial axes are not known",
                "Leave tiling out",
            )
        if axes != len(setting.tile):
            raise UsageError(
                f"the tile {list(setting.tile)} of tiling has {len(setting.tile)} lengths, and the model's "
                f"convolutions have {axes}",
                "Give one for each",
            )
        live.set(live, "host_inputs", True)
        live.surround(live.model, InTiles(setting, live.device))


class InTiles:
    """Calls a model tile by tile."""

    def __init__(self, setting: TilingSetting, device: torch.device) -> None:
        self.setting, self.device = setting, device

    def __call__(self, module: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward pass over all tiles of the first picture among the arguments.

        Raises:
            UsageError: none of them is one.
        """
        values = [*args, *kwargs.values()]
        axes = len(self.setting.tile)
        at = next(
            (
                number
                for number, value in enumerate(values)
                if isinstance(value, torch.Tensor) and value.dim() == axes + 2
            ),
            None,
        )
        if at is None:
            raise UsageError(
                f"no argument of {type(module).__name__} is a tensor with {axes + 2} axes, as tiles are cut from",
                "Leave tiling out",
            )
        picture = values[at]
        there = [
            value if number == at or not isinstance(value, torch.Tensor) else value.to(self.device)
            for number, value in enumerate(values)
        ]

        def call(tiles: torch.Tensor) -> Any:
            given = [tiles if number == at else value for number, value in enumerate(there)]
            named = dict(zip(kwargs, given[len(args) :], strict=True))
            return forward(*given[: len(args)], **named)

        job = job_of_module(module, call, picture, self.setting.settings(), self.device)
        return run_job(job)


def _ladder(longest: int, axes: int) -> Iterator[int]:
    """Lengths of tiles: the longest size of the workload halved again and again."""
    length = longest
    while (length := -(-length // 2)) >= _SMALLEST[axes]:
        yield -(-length // _STEP) * _STEP


def _as_it_is(batch: torch.Tensor) -> torch.Tensor:
    return batch
