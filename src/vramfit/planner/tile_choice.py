"""Chooses the tile for a live model within a budget: asked here, found in a process of its own on the virtual GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.gpus import GpuSpec
from vramfit.inference.arrays import as_source
from vramfit.inference.tile_settings import TileSettings
from vramfit.inference.tiled_inference import device_of, settled, spatial_axes
from vramfit.planner.asking import ask
from vramfit.planner.live_choice import LiveModel
from vramfit.planner.tile_trial import ChosenTile, TileQuestion

Progress = Callable[[str], None]


def choose_tile(
    model: Any,
    x: Any,
    settings: TileSettings,
    *,
    dims: int | None = None,
    device: torch.device | str | None = None,
    budget: str | float | None = None,
    gpu: str | os.PathLike[str] | GpuSpec | None = None,
    seconds: float | None = None,
    progress: Progress | None = None,
) -> ChosenTile:
    """The tile with which a model gets over an input quickest within a budget.

    Args:
        model: a module; its values stay here, its structure goes to another process.
        settings: how tiles are joined. An exact grid without a halo takes what the model is probed to need.
        budget: bytes that torch may reserve on the device, the model included; None for what is free there, less 2 %.
        gpu: the card that it is chosen for; None for the device's own.
        seconds: how long finding what tiles of the model need may take; None for 30.

    Raises:
        UsageError: the model cannot go to another process, there is no budget to choose by, or no tile fits.
        VramfitError: the model fails.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            "a tile is chosen for a module, whose structure can be looked at",
            "Give tile=, or wrap the function",
        )
    source = as_source("x", x)
    where = device_of(model, source, device)
    axes = spatial_axes(model, source, settings, dims)
    settings, given = settled(model, source, settings, axes, where, seconds)
    question = TileQuestion(
        shape=given.shape, dtype=given.dtype, dims=given.axes, settings=replace(settings, tile=None)
    )
    live = LiveModel(model=model, device=where, budget=budget, gpu=gpu)
    return ask(question, live, progress=progress)
