"""Finds which layers of a live model stay on the card within a budget: asked here, found on the virtual GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vramfit.gpus import GpuSpec
from vramfit.inference.streaming.placement import WeightPlacement
from vramfit.planner.live_choice import LiveModel, asked_about
from vramfit.planner.placement_trial import FORWARD, PlacementQuestion
from vramfit.planner.planner_job import PlaceWeightsJob

Progress = Callable[[str], None]


def place_weights(
    model: nn.Module,
    example: Any,
    *,
    method: str = FORWARD,
    never: bool = False,
    slots: int | None = None,
    device: torch.device,
    budget: str | float | None = None,
    gpu: str | os.PathLike[str] | GpuSpec | None = None,
    progress: Progress | None = None,
) -> WeightPlacement:
    """Which layers stay on the card, so that an example runs within a budget and the least crosses the link.

    Args:
        model: its values stay here, its structure goes to another process.
        example: what it is called with, or a function of the model and the device that uses it.
        method: its method that is called.
        never: whether all layers have to stay on the card.
        slots: how many waiting layers the card has memory for at once; None finds it.
        budget: bytes that torch may reserve on the device, the model included; None for what is free there, less 2 %.
        gpu: the card that is asked about; None for the device's own.

    Raises:
        UsageError: the model cannot go to another process, there is no budget, or the example does not fit.
        VramfitError: the model fails.
    """
    return asked_about(
        LiveModel(model=model, device=device, budget=budget, gpu=gpu),
        PlacementQuestion(example=example, method=method, never=never, slots=slots),
        lambda target, memory: PlaceWeightsJob(target=target, memory=memory),
        WeightPlacement,
        progress,
    )
