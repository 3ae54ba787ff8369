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
from collections.abc import Iterable
from fractions import Fraction

import torch

from vramfit.errors import UsageError
from vramfit.inference.receptive_field import USUAL_SECONDS
from vramfit.inference.tile_refusal import tile_refusal
from vramfit.inference.trial_comparison import (
    TriedTile,
    difference_of,
    kept_part,
    region_of,
    scales_of,
)
from vramfit.inference.trial_parts import (
    TrialPart,
    corner_part,
    cut_axes,
    slab_part,
    whole_part,
)
from vramfit.inference.trial_values import OutsideValues
from vramfit.inference.trial_ways import CheckedRun, at_your_word, find_way, least_parts

_SHARE = 0.2
"""What may be tried beyond the least, as a share of what the whole run is expected to take."""

_MORE_SECONDS = 1.0
"""How long changes go on after each tile has seen one."""

_GLANCE_STEPS = 1 << 18
"""Steps of an input up to which it is run whole once at least, in float64: some hundred MiB for each layer."""

_FEW_LABELS = 1e-3
"""Share of whole numbers (labels) that rounding may change where the model is not in float64."""


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


class _TileCheck:
    def __init__(self, run: CheckedRun, seconds: float | None) -> None:
        self._run, self._layout, self._asked = run, run.layout, seconds
        self._axes = len(run.layout.spatial)
        self._seconds = USUAL_SECONDS if seconds is None else seconds
        self._began = time.monotonic()
        self._changes = 0
        self._way = find_way(run, self._seconds)
        if seconds is None:
            self._seconds = max(self._seconds, self._expected())

    def check(self) -> None:
        """All trials."""
        least = least_parts(self._layout, self._way.thin)
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
        kinds = list(OutsideValues)
        tiles: list[TriedTile] = []
        until = time.monotonic() + _MORE_SECONDS
        scales: list[tuple[Fraction, ...]] = []
        for round_ in range(len(kinds)):
            for number, place in enumerate(part.tiles):
                if round_ and time.monotonic() > until:
                    return
                self._in_time(part)
                if not round_:
                    given = values.tile(base, region_of(place), dark=number % 2 == 1)
                    alone = model.outputs(given)
                    scales = scales or [scales_of(one, place) for one in alone]
                    tiles.append(TriedTile(place, given, alone))
                how = kinds[(self._changes + number + round_) % len(kinds)]
                self._compare(part, tiles[number], values.beyond(base, how), scales, how)
        self._changes += len(part.tiles)

    def _glance(self, part: TrialPart) -> None:
        """The first, a middle and the last tile as parts of one run over all of it: what its size decides."""
        base, model = self._way.values.base(part.sizes), self._way.model
        outputs = model.outputs(base)
        scales: list[tuple[Fraction, ...]] = []
        for place in part.tiles[:3]:
            given = base[(slice(None), slice(None), *region_of(place))].clone()
            alone = model.outputs(given)
            scales = scales or [scales_of(one, place) for one in alone]
            self._judge(part, TriedTile(place, given, alone), base, outputs, scales, OutsideValues.NOISE)

    def _compare(
        self,
        part: TrialPart,
        trial: TriedTile,
        whole: torch.Tensor,
        scales: list[tuple[Fraction, ...]],
        how: OutsideValues,
    ) -> None:
        whole[(slice(None), slice(None), *region_of(trial.place))] = trial.given
        self._judge(part, trial, whole, self._way.model.outputs(whole), scales, how)

    def _judge(
        self,
        part: TrialPart,
        trial: TriedTile,
        whole: torch.Tensor,
        outputs: list[torch.Tensor],
        scales: list[tuple[Fraction, ...]],
        how: OutsideValues,
    ) -> None:
        """Refuse a tile whose kept part differs from that of the run over all."""
        if len(outputs) != len(trial.alone):
            raise self._refusal(part, trial, whole, 1.0, how)
        worst = 0.0
        for output, alone, scale in zip(outputs, trial.alone, scales, strict=True):
            if output.dim() <= self._axes or not all(scale):
                continue  # the run itself says what is wrong with such a result
            parts = (
                kept_part(output, trial.place, scale, part.sizes),
                kept_part(alone, trial.place, scale, part.sizes, alone=True),
            )
            worst = max(worst, difference_of(*parts, output) / self._allowed(output))
        if worst > 1:
            raise self._refusal(part, trial, whole, worst * self._allowed(outputs[0]), how)

    def _refusal(
        self, part: TrialPart, trial: TriedTile, whole: torch.Tensor, difference: float, how: OutsideValues
    ) -> UsageError:
        return tile_refusal(
            part,
            trial,
            whole,
            difference=difference,
            how=how,
            layout=self._layout,
            model=self._way.model,
            values=self._way.values,
        )

    def _allowed(self, output: torch.Tensor) -> float:
        model = self._way.model
        if not (output.is_floating_point() or output.is_complex()):
            return 1e-12 if model.exact else _FEW_LABELS
        return model.bar(output)

    def _furthest(self, these: Iterable[torch.Tensor], those: Iterable[torch.Tensor]) -> float:
        pairs = zip(these, those, strict=False)
        return max((difference_of(one, other, one) / self._allowed(one) for one, other in pairs), default=0.0)

    def _in_time(self, part: TrialPart) -> None:
        step = self._way.takes(part) / max(1, len(part.tiles))
        if self._left() < step:
            needed = 2 * (
                self._seconds + sum(self._way.takes(one) for one in least_parts(self._layout, self._way.thin))
            )
            raise UsageError(
                f"whether tiles give what the whole run gives could not be checked in {self._seconds:.3g} s",
                f"Pass seconds={needed:.0f}, or {at_your_word(self._layout)} to take the halo that was found at your "
                "word",
            )
