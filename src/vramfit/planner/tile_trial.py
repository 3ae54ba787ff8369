"""Runs tiles of a model on a device, to choose one: the first batches of a run, with all buffers as for the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.inference.arrays import Blank
from vramfit.inference.tile_runner import TileJob
from vramfit.inference.tile_settings import TileSettings, per_axis, shares_per_axis
from vramfit.inference.tiled_inference import make_job, rehearse
from vramfit.planner.devices.cost import DeviceBackend, own_step_cost
from vramfit.planner.planner_questions import PlannerQuestion, QuestionContext
from vramfit.planner.tile_search import TileCost, TileOption, TileSearch, tile_options
from vramfit.units import format_bytes

Progress = Callable[[str], None]

BATCHES = 4
"""Batches of tiles that are run: the first finds nothing to send back, the last nothing to bring."""

_DEFAULT_OVERLAP = 0.25
"""Of blended tiles, as `vramfit.inference` has it."""

_BARELY = 1.1
"""How far above the limit an endless device may end, for a device of just the limit to be tried: there the allocator
gives cached blocks back before it fails."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenTile:
    """The tile that is the quickest within a limit.

    Attributes:
        tile: its length along each dimension, halo included.
        tile_batch: tiles that the model is given at once.
        tiles: how many cover the input.
        reserved_bytes: peak of what torch reserves, the model included.
        seconds: for the whole input, estimated from the first batches.
        runs: tiles that were run to find it.
    """

    tile: tuple[int, ...]
    tile_batch: int
    tiles: int
    reserved_bytes: int
    seconds: float
    runs: int


@dataclass(frozen=True, kw_only=True)
class TileQuestion(PlannerQuestion[ChosenTile]):
    """What a tile is chosen for; goes to another process.

    Attributes:
        shape: of the input: ``[B, C, *spatial]`` or ``[C, *spatial]``.
        dtype: of the input.
        dims: spatial dimensions.
        settings: with the halo and stride that the model needs, or with an overlap.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    dims: int
    settings: TileSettings

    @property
    def spatial(self) -> tuple[int, ...]:
        """The input's length along each spatial dimension."""
        return self.shape[len(self.shape) - self.dims :]

    def answer(self, asked: QuestionContext) -> ChosenTile:
        """See `PlannerQuestion.answer`."""
        return quickest_tile(asked.device, asked.workload.model, self, asked.memory.budget, asked.progress)


def options_of(question: TileQuestion) -> list[TileOption]:
    """The tiles that are worth a look."""
    settings, dims = question.settings, question.dims
    if settings.blended:
        overlap = _DEFAULT_OVERLAP if settings.overlap is None else settings.overlap
        return tile_options(
            question.spatial,
            halo=(0,) * dims,
            stride=(1,) * dims,
            overlap=shares_per_axis("overlap", overlap, dims, most=1),
        )
    halo = per_axis("halo", 0 if settings.halo is None else settings.halo, dims, least=0)
    stride = per_axis("stride", 1 if settings.stride is None else settings.stride, dims, least=1)
    return tile_options(question.spatial, halo=halo, stride=stride)


def quickest_tile(
    device: DeviceBackend,
    make_model: Callable[[], nn.Module],
    question: TileQuestion,
    limit: int,
    progress: Progress = lambda _text: None,
) -> ChosenTile:
    """The tile with which a model gets over its input quickest.

    Args:
        limit: bytes that torch may reserve on the device, the model included.

    Raises:
        UsageError: the smallest tile does not fit.
        VramfitError: the model fails.
    """
    trial = TileTrial(device, make_model, question, limit)
    search = TileSearch(options_of(question), trial.cost, limit, progress)
    best = search.best()
    if best is None:
        option, cost = search.smallest
        raise UsageError(
            f"{option.words} reserve {format_bytes(cost.total_bytes)}, "
            f"more than the budget of {format_bytes(limit)}",
            "Allow more, or take a smaller model or precision",
        )
    option, cost = best
    return ChosenTile(
        tile=option.tile,
        tile_batch=option.batch,
        tiles=option.count,
        reserved_bytes=cost.total_bytes,
        seconds=cost.seconds,
        runs=len(search.seen),
    )


class TileTrial:
    """Runs tiles of one model over one input on a device.

    Args:
        limit: bytes that torch may reserve.
    """

    def __init__(
        self, device: DeviceBackend, make_model: Callable[[], nn.Module], question: TileQuestion, limit: int
    ) -> None:
        self._device, self._make, self._question, self._limit = device, make_model, question, limit
        self._failed: str | None = None

    def cost(self, option: TileOption) -> TileCost:
        """Run the first batches of a tile.

        Raises:
            VramfitError: the model fails.
        """
        settings = replace(self._question.settings, tile=option.tile, tile_batch=option.batch)
        ran: list[tuple[int, int]] = []

        def step(state: Any, _batch: Any) -> None:
            job = self._job(state.model, settings, state.device)
            ran.append((rehearse(job, BATCHES).batches, job.layout.batches))

        cost = own_step_cost(self._device, self._make, step)
        fits = cost.peak_reserved_bytes <= self._limit
        if not fits and cost.peak_reserved_bytes <= _BARELY * self._limit:
            fits = own_step_cost(self._device, self._make, step, self._limit + cost.outside_bytes).fits
        batches, of = ran[-1]
        return TileCost(
            fits=fits, total_bytes=cost.peak_reserved_bytes, seconds=cost.step_seconds * of / batches
        )

    def _job(self, model: nn.Module, settings: TileSettings, device: torch.device) -> TileJob:
        question = self._question
        given = Blank(question.shape, question.dtype)
        return make_job(model, given, settings, dims=question.dims, device=device)
