"""Checks by values that tiles with a halo give what the whole run gives: what lies beyond a tile is changed.

NOTE [Changing the outside]: a tile with its halo is kept, and everything beyond it is replaced: by noise, scaled,
shifted and saturated values. The kept part of a run over all of it has to be what the tile alone gives, in corners,
at borders and in the middle, at lengths with the input's own parity and remainder. So nothing is missed that a
comparison over the given picture alone would miss (the brightest pixel stands in every tile), nor what depends on the
length of the input (coordinates, a resize to a given size). A copy in float64 tells rounding from dependence: the
former is below 1e-9 of the largest value. Where a copy is too slow, the model itself runs, with bars that its dtype
allows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from vramfit.errors import UsageError
from vramfit.inference.probe_subject import ProbeStoppedError
from vramfit.inference.receptive_field import USUAL_SECONDS
from vramfit.inference.tile_grid import AxisTile, TileLayout
from vramfit.inference.tile_runner import TileInput
from vramfit.inference.trial_cause import TrialRun, first_difference
from vramfit.inference.trial_model import TrialModel, exact_model, own_model
from vramfit.inference.trial_parts import (
    TrialPart,
    corner_part,
    cut_axes,
    longer_sizes,
    slab_part,
    thin_lengths,
    whole_part,
)
from vramfit.inference.trial_values import Outside, TrialValues

_SHARE = 0.2
"""What may be tried beyond the least, as a share of what the whole run is expected to take."""

_MORE_SECONDS = 1.0
"""How long changes go on after each tile has seen one."""

_GLANCE_STEPS = 1 << 18
"""Steps of an input up to which it is run whole once at least, in float64: some hundred MiB for each layer."""

_FEW_LABELS = 1e-3
"""Share of whole numbers (labels) that rounding may change where the model is not in float64."""


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


def check_tiles(run: CheckedRun, seconds: float | None = None) -> None:
    """Refuse a run whose tiles would give another result than the whole.

    Args:
        run: with the halo and the stride that were found.
        seconds: how long it may take; None for 30, or what the whole run is expected to take if that is more.

    Raises:
        UsageError: a kept value changes with what lies beyond its tile, or with the input's length; two equal calls
            give different outputs; or there was not enough time to know.
    """
    if cut_axes(run.layout):
        _TileCheck(run, seconds).check()


@dataclass(frozen=True, kw_only=True)
class _Way:
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


class _TileCheck:
    def __init__(self, run: CheckedRun, seconds: float | None) -> None:
        self._run, self._layout, self._asked = run, run.layout, seconds
        self._axes = len(run.layout.spatial)
        self._seconds = USUAL_SECONDS if seconds is None else seconds
        self._began = time.monotonic()
        self._changes = 0
        self._way = self._find_way()
        if seconds is None:
            self._seconds = max(self._seconds, self._expected())

    def check(self) -> None:
        """All trials."""
        least = self._least()
        self._steady(least[0])
        allowed = min(self._seconds, max(4 * _MORE_SECONDS, _SHARE * self._expected()))
        whole = whole_part(self._layout)
        if self._way.takes(whole) <= allowed:
            self._try(whole)
            return
        steps = math.prod(whole.sizes)
        if steps <= _GLANCE_STEPS and steps * self._way.rate <= self._seconds / 4:
            self._glance(whole)
        for short in least:
            axis = next(at for at, tiles in enumerate(zip(*short.tiles, strict=True)) if len(set(tiles)) > 1)
            long = slab_part(self._layout, axis, self._way.thin, long=True)
            self._try(long if self._way.takes(long) <= allowed / len(least) else short)
        corner = corner_part(self._layout)
        if len(least) > 1 and self._way.takes(corner) <= min(allowed, self._left()):
            self._try(corner)

    # -- ways to call the model -----------------------------------------------------------------------------------

    def _find_way(self) -> _Way:
        """In float64 if there is time for it, else the model itself."""
        run = self._run
        ways: list[_Way] = []
        failure = ""
        for make in (
            lambda: exact_model(run.model, run.prepare),
            lambda: own_model(run.model, run.prepare, run.device),
        ):
            try:
                way = self._way_of(make())
            except ProbeStoppedError as stop:
                failure = failure or str(stop)
                continue
            ways.append(way)
            if sum(map(way.takes, self._least(way.thin))) <= self._seconds / 2:
                return way
        if not ways:
            raise UsageError(
                f"whether tiles give what the whole run gives could not be checked: {failure}",
                f"Pass {self._word()} to take it at your word, or overlap= for tiles that are blended",
            )
        return min(ways, key=lambda way: way.rate)

    def _way_of(self, model: TrialModel) -> _Way:
        """The thinnest slab that the model takes, and how long it takes.

        Raises:
            ProbeStoppedError: it takes none.
        """
        given = self._run.given
        values = TrialValues(given.source, batched=given.batched, axes=given.axes, exact=model.exact)
        first: Exception | None = None
        for thin in thin_lengths(self._layout):
            parts = self._least(thin)
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
            call, rate = self._pace(model, values, parts[-1].sizes)
            return _Way(model=model, values=values, thin=thin, call=call, rate=rate)
        raise ProbeStoppedError(f"it fails on a part of the input: {str(first).partition(chr(10))[0]}")

    def _pace(self, model: TrialModel, values: TrialValues, sizes: tuple[int, ...]) -> tuple[float, float]:
        """Seconds for any call, and for each step of the input, from a small input and a larger one."""

        def timed(lengths: tuple[int, ...]) -> float:
            given = values.base(lengths)
            began = time.monotonic()
            model.outputs(given)
            return time.monotonic() - began

        small, larger = sizes, longer_sizes(self._layout, sizes)
        few, many = math.prod(small), math.prod(larger)
        taken = timed(small)
        if many == few or taken * many / few > _MORE_SECONDS:
            return 0.0, taken / few
        try:
            rate = max(0.0, timed(larger) - taken) / (many - few)
        except Exception:  # it takes no input of that size
            return 0.0, taken / few
        return max(0.0, taken - rate * few), rate

    def _least(self, thin: int | None = None) -> list[TrialPart]:
        """What has to be tried: a short slab along each axis that is cut."""
        width = self._way.thin if thin is None else thin
        return [slab_part(self._layout, axis, width, long=False) for axis in cut_axes(self._layout)]

    def _expected(self) -> float:
        """Seconds of the whole run, called this way."""
        layout = self._layout
        steps = layout.work * layout.items * math.prod(layout.spatial)
        return layout.total * self._way.call + steps * self._way.rate

    def _left(self) -> float:
        return self._seconds - (time.monotonic() - self._began)

    # -- trials ---------------------------------------------------------------------------------------------------

    def _steady(self, part: TrialPart) -> None:
        """Two equal calls agree, and an example's outputs do not depend on its neighbours in the batch."""
        model, values = self._way.model, self._way.values
        pair = values.base([axis.size for axis in part.tiles[0]], examples=2)
        one, again = model.outputs(pair[:1], seed=1), model.outputs(pair[:1], seed=2)
        if self._furthest(one, again) > 1:
            raise UsageError(
                "two equal calls of the model give different outputs, as with dropout or noise: tiles would draw "
                "other numbers than the whole",
                "Call model.eval() first, or take the random numbers out of the model",
            )
        if self._layout.items == 1 and self._layout.tile_batch == 1:
            return
        both = [output[:1] for output in model.outputs(pair)]
        if self._furthest(one, both) > 1:
            raise UsageError(
                "an example's result depends on the other examples of its batch", "Call model.eval() first"
            )

    def _try(self, part: TrialPart) -> None:
        """Every tile of a part with one change beyond it, and with others while there is time."""
        values, model = self._way.values, self._way.model
        base = values.base(part.sizes)
        kinds = list(Outside)
        tiles: list[_Trial] = []
        until = time.monotonic() + _MORE_SECONDS
        scales: list[tuple[Fraction, ...]] = []
        for round_ in range(len(kinds)):
            for number, place in enumerate(part.tiles):
                if round_ and time.monotonic() > until:
                    return
                self._in_time(part)
                if not round_:
                    given = values.tile(base, _region(place), dark=number % 2 == 1)
                    alone = model.outputs(given)
                    scales = scales or [_scales(one, place) for one in alone]
                    tiles.append(_Trial(place, given, alone))
                how = kinds[(self._changes + number + round_) % len(kinds)]
                self._compare(part, tiles[number], values.beyond(base, how), scales, how)
        self._changes += len(part.tiles)

    def _glance(self, part: TrialPart) -> None:
        """The first, a middle and the last tile as parts of one run over all of it: what its size decides."""
        base, model = self._way.values.base(part.sizes), self._way.model
        outputs = model.outputs(base)
        scales: list[tuple[Fraction, ...]] = []
        for place in part.tiles[:3]:
            given = base[(slice(None), slice(None), *_region(place))].clone()
            alone = model.outputs(given)
            scales = scales or [_scales(one, place) for one in alone]
            self._judge(part, _Trial(place, given, alone), base, outputs, scales, Outside.NOISE)

    def _compare(
        self,
        part: TrialPart,
        trial: _Trial,
        whole: torch.Tensor,
        scales: list[tuple[Fraction, ...]],
        how: Outside,
    ) -> None:
        whole[(slice(None), slice(None), *_region(trial.place))] = trial.given
        self._judge(part, trial, whole, self._way.model.outputs(whole), scales, how)

    def _judge(
        self,
        part: TrialPart,
        trial: _Trial,
        whole: torch.Tensor,
        outputs: list[torch.Tensor],
        scales: list[tuple[Fraction, ...]],
        how: Outside,
    ) -> None:
        """Refuse a tile whose kept part differs from that of the run over all."""
        if len(outputs) != len(trial.alone):
            raise self._refusal(part, trial, whole, 1.0, how)
        worst = 0.0
        for output, alone, scale in zip(outputs, trial.alone, scales, strict=True):
            if output.dim() <= self._axes or not all(scale):
                continue  # the run itself says what is wrong with such a result
            parts = (
                _kept(output, trial.place, scale, part.sizes),
                _kept(alone, trial.place, scale, part.sizes, alone=True),
            )
            worst = max(worst, _difference(*parts, output) / self._allowed(output))
        if worst > 1:
            raise self._refusal(part, trial, whole, worst * self._allowed(outputs[0]), how)

    def _allowed(self, output: torch.Tensor) -> float:
        model = self._way.model
        if not (output.is_floating_point() or output.is_complex()):
            return 1e-12 if model.exact else _FEW_LABELS
        return model.bar(output)

    def _furthest(self, these: Iterable[torch.Tensor], those: Iterable[torch.Tensor]) -> float:
        pairs = zip(these, those, strict=False)
        return max((_difference(one, other, one) / self._allowed(one) for one, other in pairs), default=0.0)

    def _in_time(self, part: TrialPart) -> None:
        step = self._way.takes(part) / max(1, len(part.tiles))
        if self._left() < step:
            needed = 2 * (self._seconds + sum(self._way.takes(one) for one in self._least()))
            raise UsageError(
                f"whether tiles give what the whole run gives could not be checked in {self._seconds:.3g} s",
                f"Pass seconds={needed:.0f}, or {self._word()} to take the halo that was found at your word",
            )

    def _word(self) -> str:
        layout = self._layout
        return f"halo={_short(layout.halo)}, stride={_short(layout.stride)}"

    # -- what is said -----------------------------------------------------------------------------------------------

    def _refusal(
        self, part: TrialPart, trial: _Trial, whole: torch.Tensor, difference: float, how: Outside
    ) -> UsageError:
        """What changes a kept value: what lies beyond the tile, or the length of the input."""
        values, model, layout = self._way.values, self._way.model, self._layout
        kept = tuple((axis.keep_start, axis.keep_stop) for axis in trial.place)
        bar = model.bar(whole)
        share = (
            f"by {difference:.2g} of the largest value"
            if difference < 1e6
            else "in its shape or by no number"
        )
        for other in Outside:
            changed = values.beyond(values.base(part.sizes), other)
            changed[(slice(None), slice(None), *_region(trial.place))] = trial.given
            cause = first_difference(
                model, TrialRun(given=whole, kept=kept), TrialRun(given=changed, kept=kept), bar
            )
            if cause:
                return UsageError(
                    f"{_OTHER}what lies beyond the halo of {_short(layout.halo)} changes it {share}, as with "
                    f"{how.value} there; first in {cause}",
                    _INSTEAD,
                )
        inner = tuple((axis.keep_start - axis.start, axis.keep_stop - axis.start) for axis in trial.place)
        cause = first_difference(
            model, TrialRun(given=trial.given, kept=inner), TrialRun(given=whole, kept=kept), bar
        )
        first = f"; first in {cause}" if cause else ""
        for size, stride in zip(layout.spatial, layout.stride, strict=True):
            if size % stride:
                return UsageError(
                    f"{_OTHER}its length {size} is no multiple of {stride}, and that changes it {share}{first}",
                    f"Pad or crop the input to a multiple of {stride}, or pass overlap= for tiles that are blended",
                )
        return UsageError(f"{_OTHER}a tile's place or the input's size changes it {share}{first}", _INSTEAD)


_OTHER = "tiles would give another result than the whole run: "
_INSTEAD = (
    "Pass overlap= for tiles that are blended, which is another result; or take what needs the whole input out of "
    "the model"
)


@dataclass(frozen=True)
class _Trial:
    place: tuple[AxisTile, ...]
    given: torch.Tensor
    alone: list[torch.Tensor]


def _region(place: tuple[AxisTile, ...]) -> tuple[slice, ...]:
    return tuple(slice(axis.start, axis.stop) for axis in place)


def _scales(output: torch.Tensor, place: tuple[AxisTile, ...]) -> tuple[Fraction, ...]:
    """Output steps for each of the input, of a tile whose length the stride divides."""
    lengths = output.shape[-len(place) :]
    return tuple(Fraction(length, axis.size) for length, axis in zip(lengths, place, strict=False))


def _kept(
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


def _difference(one: torch.Tensor, other: torch.Tensor, whole: torch.Tensor) -> float:
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


def _short(values: tuple[int, ...]) -> str:
    return str(values[0]) if len(set(values)) == 1 else str(values)
