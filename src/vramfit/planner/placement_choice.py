"""Finds which layers of a live model stay on the card within a budget: asked here, found on the virtual GPU."""

from __future__ import annotations

from collections.abc import Callable

from vramfit.inference.streaming.weight_placement import WeightPlacement
from vramfit.planner.asking import ask
from vramfit.planner.live_choice import LiveModel
from vramfit.planner.placement_trial import PlacementQuestion, refuse_by_weights

Progress = Callable[[str], None]


def place_weights(
    live: LiveModel, question: PlacementQuestion, progress: Progress | None = None
) -> WeightPlacement:
    """Which layers stay on the card, so that an example runs within a budget and the least crosses the link.

    Args:
        live: the model, whose values stay here while its structure goes to another process, and where it has to fit.
        question: the use of it that has to fit.

    Raises:
        UsageError: the model cannot go to another process, there is no budget, or the example does not fit.
        VramfitError: the model fails.
    """
    refuse_by_weights(live.model, live.memory().budget, question)
    if progress is not None:
        progress("starting a process with the virtual card")
    return ask(question, live, progress=progress)
