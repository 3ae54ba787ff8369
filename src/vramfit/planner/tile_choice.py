"""Chooses the tile for a live model within a budget: asked here, found in a process of its own on the virtual GPU."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vramfit.arguments import size_argument
from vramfit.errors import UnknownGpuError, UsageError
from vramfit.gpus import GpuSpec, find_gpu
from vramfit.inference.arrays import as_source
from vramfit.inference.tile_settings import TileSettings
from vramfit.inference.tiled_inference import device_of, settled, spatial_axes
from vramfit.launch.job import Failure
from vramfit.planner.packed_model import pack
from vramfit.planner.planner_job import MARGIN, ChooseTileJob, DeviceMemory
from vramfit.planner.planner_run import run_task
from vramfit.planner.tile_trial import ChosenTile, TileQuestion

Progress = Callable[[str], None]

_chosen: dict[str, ChosenTile] = {}
"""What was found in this process, by what was asked."""


def choose_tile(
    model: Any,
    x: Any,
    settings: TileSettings,
    *,
    dims: int | None = None,
    device: torch.device | str | None = None,
    budget: str | float | None = None,
    gpu: str | os.PathLike[str] | GpuSpec | None = None,
    progress: Progress | None = None,
) -> ChosenTile:
    """The tile with which a model gets over an input quickest within a budget.

    Args:
        model: a module; its values stay here, its structure goes to another process.
        settings: how tiles are joined. An exact grid without a halo takes what the model is probed to need.
        budget: bytes that torch may reserve on the device, the model included; None for what is free there, less 2 %.
        gpu: the card that it is chosen for; None for the device's own.

    Raises:
        UsageError: the model cannot go to another process, there is no budget to choose by, or no tile fits.
        VramfitError: the model fails.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            "a tile is chosen for a module, whose structure can be looked at", "Give tile=, or wrap the function"
        )
    source = as_source("x", x)
    where = device_of(model, source, device)
    settings, given = settled(model, source, settings, spatial_axes(model, source, settings, dims), where)
    card = _card(where, gpu)
    limit = _limit(model, where, card, budget, own=gpu is None)
    question = TileQuestion(
        shape=given.shape, dtype=given.dtype, dims=given.axes, settings=replace(settings, tile=None)
    )
    memory = DeviceMemory(device="cpu" if card is None else "cuda", gpu=card, budget=limit)
    with tempfile.TemporaryDirectory(prefix="vramfit-") as name:
        target = pack(model, question, Path(name))
        asked = hashlib.sha256(Path(name, "packed.pickle").read_bytes() + repr(memory).encode()).hexdigest()
        if asked not in _chosen:
            found = run_task(ChooseTileJob(target=target, memory=memory), ChosenTile, progress)
            if isinstance(found, Failure):
                raise found.error()
            _chosen[asked] = found.found
    return _chosen[asked]


def _card(device: torch.device, gpu: str | os.PathLike[str] | GpuSpec | None) -> GpuSpec | None:
    """The card that a tile is chosen for; None for the CPU.

    Raises:
        UsageError: the device's own card is none that vramfit knows.
    """
    if gpu is not None:
        return find_gpu(gpu)
    if device.type == "cpu":
        return None
    name = torch.cuda.get_device_name(device)
    try:
        return replace(find_gpu(name), total_bytes=torch.cuda.mem_get_info(device)[1])
    except UnknownGpuError as error:
        raise UsageError(
            f"the card {name} is not in the catalogue", "Say which one comes near: gpu=, or give tile="
        ) from error


def _limit(
    model: nn.Module, device: torch.device, card: GpuSpec | None, budget: str | float | None, *, own: bool
) -> int:
    """Bytes that torch may reserve.

    Raises:
        UsageError: it is for the CPU, and no budget was given.
    """
    if budget is not None:
        return size_argument("budget", budget)
    if card is None:
        raise UsageError("no tile and no budget are given", 'Give tile=64, or budget="2GiB"')
    if not own or device.type != "cuda":
        return card.total_bytes - card.typical_context_bytes - round(MARGIN * card.total_bytes)
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    there = sum(one.nbytes for one in {*model.parameters(), *model.buffers()} if one.device == device)
    return max(1, free + held + there - round(MARGIN * total))
