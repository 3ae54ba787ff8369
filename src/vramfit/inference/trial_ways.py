"""How the check of tiles calls a model: in float64 or as it is, with slabs of which length, and what a call takes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vramfit.errors import UsageError
from vramfit.inference.probe_subject import ProbeStoppedError
from vramfit.inference.tile_grid import TileLayout
from vramfit.inference.tile_runner import TileInput
from vramfit.inference.trial_comparison import short_text
from vramfit.inference.trial_model import TrialModel, exact_model, own_model
from vramfit.inference.trial_parts import TrialPart, cut_axes, longer_sizes, slab_part, thin_lengths
from vramfit.inference.trial_values import TrialValues

_SLOW = 1.0
"""Seconds of a call beyond which a small input alone tells what a step takes."""


@dataclass(frozen=True, kw_only=True)
class CheckedRun:
    """What is checked.

    Attributes:
        model: a module or a function of a batch of tiles.
        given: the input.
        layout: its tiles.
        prepare: what a batch becomes before the model gets it; None brings it to the model's dtype.
        device: where the model computes.
    """

    model: Callable[..., Any]
    given: TileInput
    layout: TileLayout
    prepare: Callable[[torch.Tensor], torch.Tensor] | None
    device: torch.device


@dataclass(frozen=True, kw_only=True)
class TrialWay:
    """A way to call the model, with what it takes.

    Attributes:
        thin: length of slabs that the model takes.
        call: seconds for a call of any size.
        rate: seconds more for each step of the input.
    """

    model: TrialModel
    values: TrialValues
    thin: int
    call: float
    rate: float

    def takes(self, part: TrialPart) -> float:
        """Seconds for one change beyond each tile of a part."""
        return part.calls * self.call + part.steps * self.rate


def find_way(run: CheckedRun, seconds: float) -> TrialWay:
    """In float64 if there is time for it, else the model as it is.

    Args:
        seconds: how long the check may take.

    Raises:
        UsageError: the model takes no part of the input in either way.
    """
    ways: list[TrialWay] = []
    failure = ""
    makers: tuple[Callable[[], TrialModel], ...] = (
        lambda: exact_model(run.model, run.prepare),
        lambda: own_model(run.model, run.prepare, run.device),
    )
    for make in makers:
        try:
            way = _way_of(run, make())
        except ProbeStoppedError as stop:
            failure = failure or str(stop)
            continue
        ways.append(way)
        if sum(map(way.takes, least_parts(run.layout, way.thin))) <= seconds / 2:
            return way
    if not ways:
        raise UsageError(
            f"whether tiles give what the whole run gives could not be checked: {failure}",
            f"Pass {at_your_word(run.layout)} to take it at your word, or overlap= for tiles that are blended",
        )
    return min(ways, key=lambda way: way.rate)


def least_parts(layout: TileLayout, thin: int) -> list[TrialPart]:
    """What has to be tried: a short slab along each axis that is cut."""
    return [slab_part(layout, axis, thin, long=False) for axis in cut_axes(layout)]


def at_your_word(layout: TileLayout) -> str:
    """The arguments by which a halo is given, and so not checked."""
    return f"halo={short_text(layout.halo)}, stride={short_text(layout.stride)}"


def _way_of(run: CheckedRun, model: TrialModel) -> TrialWay:
    """The thinnest slab that the model takes, and how long it takes.

    Raises:
        ProbeStoppedError: it takes none.
    """
    given = run.given
    values = TrialValues(given.source, batched=given.batched, axes=given.axes, exact=model.exact)
    first: Exception | None = None
    for thin in thin_lengths(run.layout):
        parts = least_parts(run.layout, thin)
        try:
            for part in parts:
                tile = part.tiles[0]
                model.outputs(values.base([axis.size for axis in tile]))
            for part in parts:
                found = model.outputs(values.base(part.sizes))
        except (
            Exception
        ) as error:  # a size that does not suit, or weights of another dtype: any exception says so
            first = first or error
            continue
        if model.exact and any(one.is_floating_point() and one.dtype != torch.float64 for one in found):
            raise ProbeStoppedError("it does not compute in the dtype of its input")
        call, rate = _pace(run.layout, model, values, parts[-1].sizes)
        return TrialWay(model=model, values=values, thin=thin, call=call, rate=rate)
    raise ProbeStoppedError(f"it fails on a part of the input: {str(first).partition(chr(10))[0]}")


def _pace(
    layout: TileLayout, model: TrialModel, values: TrialValues, sizes: tuple[int, ...]
) -> tuple[float, float]:
    """Seconds for any call, and for each step of the input, from a small input and a larger one."""

    def timed(lengths: tuple[int, ...]) -> float:
        given = values.base(lengths)
        began = time.monotonic()
        model.outputs(given)
        return time.monotonic() - began

    small, larger = sizes, longer_sizes(layout, sizes)
    few, many = math.prod(small), math.prod(larger)
    taken = timed(small)
    if many == few or taken * many / few > _SLOW:
        return 0.0, taken / few
    try:
        rate = max(0.0, timed(larger) - taken) / (many - few)
    except Exception:  # it takes no input of that size
        return 0.0, taken / few
    return max(0.0, taken - rate * few), rate
