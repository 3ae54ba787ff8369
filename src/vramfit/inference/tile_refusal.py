"""Why tiles would give another result than the whole run, in words: what changes a value, and in which call first."""

from __future__ import annotations

import torch

from vramfit.errors import UsageError
from vramfit.inference.tile_grid import TileLayout
from vramfit.inference.trial_cause import TrialRun, first_difference
from vramfit.inference.trial_comparison import TriedTile, region_of, short_text
from vramfit.inference.trial_model import TrialModel
from vramfit.inference.trial_parts import TrialPart
from vramfit.inference.trial_values import OutsideValues, TrialValues

_OTHER = "tiles would give another result than the whole run: "
_INSTEAD = (
    "Pass overlap= for tiles that are blended, which is another result; or take what needs the whole input out of "
    "the model"
)


def tile_refusal(
    part: TrialPart,
    trial: TriedTile,
    whole: torch.Tensor,
    *,
    difference: float,
    how: OutsideValues,
    layout: TileLayout,
    model: TrialModel,
    values: TrialValues,
) -> UsageError:
    """What changes a kept value: what lies beyond the tile, or the length of the input.

    Args:
        part: what was run whole.
        trial: the tile whose kept part differs.
        whole: the values of the part, with the tile's in their place.
        difference: by how much, as a share of the largest value.
        how: what was put beyond the tile.
        layout: the tiles of the run.
        model: as it was called.
        values: makes inputs.
    """
    kept = tuple((axis.keep_start, axis.keep_stop) for axis in trial.place)
    bar = model.bar(whole)
    share = (
        f"by {difference:.2g} of the largest value" if difference < 1e6 else "in its shape or by no number"
    )
    for other in OutsideValues:
        changed = values.beyond(values.base(part.sizes), other)
        changed[(slice(None), slice(None), *region_of(trial.place))] = trial.given
        cause = first_difference(
            model, TrialRun(given=whole, kept=kept), TrialRun(given=changed, kept=kept), bar
        )
        if cause:
            return UsageError(
                f"{_OTHER}what lies beyond the halo of {short_text(layout.halo)} changes it {share}, as with "
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
